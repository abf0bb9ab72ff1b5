"""Mamba-2 layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import Heads, ModelSizes, NotNegative, Section, Width, require_factors


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
