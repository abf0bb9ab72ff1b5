"""The weight algebra: pure array operations, exact inverses, no rank state, no torch import."""

from mca_models.weights.layouts import (
    SEPARATE,
    Alternating,
    Concat,
    Each,
    GroupedHeads,
    Layout,
    Separate,
    Shaped,
    SwappedHalves,
    Transposed,
)
from mca_models.weights.rules import COLUMN, GATED, REPLICATED, ROW, Param, Shard, Stage, each

__all__ = [
    "COLUMN",
    "GATED",
    "REPLICATED",
    "ROW",
    "SEPARATE",
    "Alternating",
    "Concat",
    "Each",
    "GroupedHeads",
    "Layout",
    "Param",
    "Separate",
    "Shaped",
    "Shard",
    "Stage",
    "SwappedHalves",
    "Transposed",
    "each",
]
