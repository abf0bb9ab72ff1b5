"""Linear attention: gated delta net and Kimi Delta Attention."""

from dataclasses import dataclass

from mca_config.model.section import Heads, Section, Width


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Section):
    """Sizes of ``linear_attention`` layers."""

    linear_conv_kernel_dim: Width
    """Kernel size of the causal convolution."""
    linear_num_key_heads: Heads
    linear_num_value_heads: Heads
    linear_key_head_dim: Width
    linear_value_head_dim: Width
    linear_channel_decay: bool = False
    """Per-channel decay of keys (Kimi Delta Attention)."""
    linear_low_rank_gates: bool = True
    """Kimi Delta Attention projects to decay and output gate through ``linear_key_head_dim`` channels."""
    linear_decay_bound: float | None = None
    """Lower bound of the log decay of Kimi Delta Attention, below 0, by a sigmoid; None: softplus, no bound."""
    linear_beta_factor: float = 1.0
    """Factor on beta, the sigmoid write strength of the delta rule."""
    linear_norm_epsilon: float | None = None
    """Epsilon of the output norm of linear attention; None: ``layernorm_epsilon``."""
