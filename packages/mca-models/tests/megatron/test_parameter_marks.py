"""Marks that Megatron reads: those that are missing or wrong are set, and counted."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_models.megatron.factory.chunks import set_parameter_attributes

TWO_EXPERT_RANKS = {"expert_model_parallel_size": 2}
SEPARATE = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
TOGETHER = {"tensor_model_parallel_size": 2}
CUT = {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1}
WHOLE = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
STRIDED = {**CUT, "partition_stride": 2}


def marked(layout: dict[str, int], marks: dict[str, Any], **param: Any) -> tuple[int, dict[str, Any]]:
    """Return how many of the ``marks`` of a parameter were set, and the marks."""
    plain = {"vocab": False, "axis": None, "expert": None} | param
    rule = SimpleNamespace(shard=SimpleNamespace(axis=plain.pop("axis")), **plain)
    tensor = SimpleNamespace(**marks)
    item: Any = SimpleNamespace(param=rule)
    count = set_parameter_attributes([(item, tensor)], ParallelLayout(**layout))  # type: ignore[list-item]
    return count, vars(tensor)


@pytest.mark.parametrize(
    ("axis", "marks", "count", "after"),
    [
        (1, {}, 1, CUT),
        (1, WHOLE, 1, CUT),
        (1, STRIDED, 0, STRIDED),
        (1, {**STRIDED, "partition_dim": 0}, 1, CUT),
        (1, {"tensor_model_parallel": True}, 1, CUT),
        (None, {}, 0, {}),
        (None, WHOLE, 0, WHOLE),
        (None, CUT, 1, WHOLE),
        (None, {"partition_dim": 0}, 1, WHOLE),
    ],
)
def test_a_parameter_is_marked_as_it_is_sharded(
    axis: int | None, marks: dict[str, Any], count: int, after: dict[str, Any]
) -> None:
    assert marked({}, marks, axis=axis) == (count, after)


@pytest.mark.parametrize(
    ("layout", "marks", "count", "after"),
    [
        ({}, {}, 0, {}),
        ({}, {"allreduce": False}, 1, {"allreduce": True}),
        (TOGETHER, {"allreduce": False}, 1, {"allreduce": True}),
        (TWO_EXPERT_RANKS, {}, 1, {"allreduce": False}),
        (TWO_EXPERT_RANKS, {"allreduce": False}, 0, {"allreduce": False}),
        (SEPARATE, {}, 1, {"allreduce": False}),
        (SEPARATE, {"allreduce": True}, 1, {"allreduce": False}),
    ],
)
def test_gradients_of_experts_are_summed_over_ranks_with_the_same_experts(
    layout: dict[str, int], marks: dict[str, Any], count: int, after: dict[str, Any]
) -> None:
    assert marked(layout, marks, expert=0) == (count, after)
    assert marked(layout, marks) == (0, marks)


def test_rows_of_the_vocabulary_have_a_mark_of_their_own() -> None:
    assert marked({}, {}, vocab=True) == (0, {"is_embedding_or_output_parameter": True})
    assert marked({}, {}, vocab=True, axis=1)[0] == 1
