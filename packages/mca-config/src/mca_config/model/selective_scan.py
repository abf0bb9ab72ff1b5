"""Selective state-space layers of Mamba 1."""

from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import NotNegative, Section, Width


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
