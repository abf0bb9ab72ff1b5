"""The weight algebra: pure array operations, exact inverses, no rank state, no torch import."""

from mca_models.weights.layouts import (
    SEPARATE,
    Concat,
    GroupedHeads,
    Interleaved,
    Layout,
    PerTensor,
    Separate,
    Shaped,
    SwappedHalves,
    Transposed,
)
from mca_models.weights.rules import COLUMN, GATED, REPLICATED, ROW, Param, Shard, Stage, expand_rules

__all__ = [
    "COLUMN",
    "GATED",
    "REPLICATED",
    "ROW",
    "SEPARATE",
    "Concat",
    "GroupedHeads",
    "Interleaved",
    "Layout",
    "Param",
    "PerTensor",
    "Separate",
    "Shaped",
    "Shard",
    "Stage",
    "SwappedHalves",
    "Transposed",
    "expand_rules",
]
