"""Layers that mix tokens by a recurrence or a convolution instead of softmax attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import Heads, ModelSizes, NotNegative, Section, Width, require_factors


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


@dataclass(frozen=True, kw_only=True)
class LightningAttention(Section):
    """Sizes of ``lightning`` layers."""

    lightning_num_heads: Heads
    """Heads, each with its own queries, keys and values; the decay of a head follows from its number."""
    lightning_head_dim: Width
    """Channels of a head."""


@dataclass(frozen=True, kw_only=True)
class Mamba(Section):
    """Sizes of ``mamba`` layers, or of mixers in parallel to attention."""

    mamba_num_heads: Heads
    mamba_head_dim: Width
    mamba_num_groups: Heads
    """Groups of heads with the same B and C."""
    mamba_state_dim: Width
    """State channels for each channel of a head."""
    mamba_conv_kernel_dim: Width
    mamba_conv_bias: bool = True
    mamba_least_step: NotNegative = 0.0
    """Lower limit of the time step dt."""
    mamba_norm: Literal["gated", "before_gate", "none"] = "gated"
    """Norm of the Mamba output: together with its gate, before the gate, or none."""
    mamba_multipliers: tuple[float, ...] | None = None
    """Factors on the parts of the input projection (z, x, B, C, dt) and on the output; None: no factors."""
    mamba_parallel_attention: bool = False
    """Every layer with attention has a parallel Mamba mixer on the same input, and both outputs are added."""
    attention_out_multiplier: float = 1.0
    """Factor on the attention output of layers with a parallel Mamba mixer."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield factors of a wrong number."""
        yield from require_factors("mamba_multipliers", self.mamba_multipliers, 6)


@dataclass(frozen=True, kw_only=True)
class SelectiveScan(Section):
    """Sizes of ``selective_scan`` layers."""

    scan_channels: Width
    """Channels between the input and the output projection; each has its state."""
    scan_state_dim: Width
    """Channels of the state of each channel."""
    scan_step_rank: Width
    """Channels from which the time steps dt are projected."""
    scan_conv_kernel_dim: Width
    """Kernel size of the causal depthwise convolution, in tokens."""
    scan_conv_bias: bool = True
    scan_norm: Literal["weighted", "plain", "none"] = "weighted"
    """RMSNorms of the time steps, B and C: with weights, without, or none."""
    scan_norm_epsilon: NotNegative | None = None
    """Epsilon of these norms; None: ``layernorm_epsilon``."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Section):
    """Sizes of ``conv`` layers, whose channels are those of the residual stream."""

    short_conv_kernel_dim: Width
    """Kernel size of the causal depthwise convolution, in tokens."""
