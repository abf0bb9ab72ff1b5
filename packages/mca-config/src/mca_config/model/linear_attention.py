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
    """Per-channel decay of keys and low-rank gates (Kimi Delta Attention)."""
    linear_beta_factor: float = 1.0
    """Factor on beta, the sigmoid write strength of the delta rule."""
    linear_norm_epsilon: float | None = None
    """Epsilon of the output norm of linear attention; None: ``layernorm_epsilon``."""
