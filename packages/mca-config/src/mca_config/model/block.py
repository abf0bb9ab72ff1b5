"""Transformer layers: how attention and MLP are added to the residual stream."""

from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import Section, Share


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
    hidden_dropout: Share = 0.0
    """Dropout of the outputs of attention and MLP before the residual addition."""
