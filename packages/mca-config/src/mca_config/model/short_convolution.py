"""Gated short convolutions (LFM2)."""

from dataclasses import dataclass

from mca_config.model.section import Section, Width


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Section):
    """Sizes of ``conv`` layers, whose channels are those of the residual stream."""

    short_conv_kernel_dim: Width
    """Kernel size of the causal depthwise convolution, in tokens."""
