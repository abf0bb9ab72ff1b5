"""Transformer layers: residual stream, norms and dense MLP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import (
    ModelSizes,
    NotNegative,
    Section,
    Share,
    Width,
    require_factors,
    require_matrix,
)


@dataclass(frozen=True, kw_only=True)
class Block(Section):
    """Order and scale of attention and MLP in a layer."""

    parallel_block: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and MLP run in parallel on the same input, after one shared norm or two separate norms."""
    single_blocks: bool = False
    """Each decoder layer is attention alone, or an MLP alone, after one norm."""
    residual_multiplier: float = 1.0
    """Factor on the outputs of attention and MLP before the residual addition."""
    layer_scalar: bool = False
    """The output of each layer is multiplied by a per-layer scalar that is not trained."""
    normed_residual: bool = False
    """The residual of attention and MLP is the output of the norm before them, not its input."""
    attention_residual_factors: tuple[float, ...] | None = None
    """Factor of each decoder layer on the residual of attention; None: without ``normed_residual``."""
    attention_output_factors: tuple[float, ...] | None = None
    """Factor of each decoder layer on the output of attention; None: without ``normed_residual``."""
    mlp_residual_factor: float = 1.0
    """Factor on the residual of the MLP; needs ``normed_residual``."""
    mlp_output_factor: float = 1.0
    """Factor on the output of the MLP; needs ``normed_residual``."""
    hidden_dropout: Share = 0.0
    """Dropout of the outputs of attention and MLP before the residual addition."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield contradictions between fields."""
        factors = {
            "attention_residual_factors": self.attention_residual_factors,
            "attention_output_factors": self.attention_output_factors,
        }
        for name, found in factors.items():
            if self.normed_residual and found is None:
                yield f"normed_residual needs {name}"
            yield from require_factors(name, found, model.num_layers)


@dataclass(frozen=True, kw_only=True)
class Norm(Section):
    """Kind and position of layer norms."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: NotNegative = 1e-6
    layernorm_zero_centered_gamma: bool = False
    norm_weight: bool = True
    """Layer norms and the final norm have weights."""
    norm_bias: bool = True
    """LayerNorms have biases too."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP, after them (before the residual is added), or both."""


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
