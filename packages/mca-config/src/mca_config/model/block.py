"""Transformer layers: how attention and MLP are added to the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import ModelSizes, Section, Share, require_factors


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
