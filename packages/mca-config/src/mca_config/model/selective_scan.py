"""Selective state-space layers of Mamba 1."""

from dataclasses import dataclass

from mca_config.model.section import Section, Width


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
