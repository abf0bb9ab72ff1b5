"""Dense MLP, whose activation experts share."""

from collections.abc import Iterator
from dataclasses import dataclass

from mca_config.model.section import ModelSizes, Section, Width, require_factors, require_matrix


@dataclass(frozen=True, kw_only=True)
class Mlp(Section):
    """Width and activation of MLPs."""

    ffn_hidden_size: Width
    """Width of the dense MLP (of one gate or up half)."""
    gated_linear_unit: bool = True
    hidden_act: str = "silu"
    """HF activation name."""
    add_bias_linear: bool = False
    """Biases on the linear layers of MLPs, and of attention (see ``add_bias_attention``)."""
    glu_linear_offset: float = 0.0
    """Offset of the up half of a gated MLP: ``activation(gate) * (up + offset)``."""
    activation_func_clamp_value: float | None = None
    """Upper limit of the gate, and limit of the up half on both sides; None: no clamp."""
    mlp_multipliers: tuple[float, ...] | None = None
    """Factors on the gate of an MLP and on its output; None: no factors."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield factors of a wrong number, and a weight that is too large."""
        yield from require_factors("mlp_multipliers", self.mlp_multipliers, 2)
        yield from require_matrix(
            ("hidden_size", model.hidden_size), ("ffn_hidden_size", self.ffn_hidden_size)
        )
