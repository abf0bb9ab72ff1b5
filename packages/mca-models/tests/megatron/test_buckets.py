"""Units of parameters that are sent together."""

import pytest

from mca_models.megatron.state.buckets import Unit, expert_slices
from mca_models.weights.rules import Param


@pytest.mark.parametrize(
    ("max_bytes", "slices"),
    [
        (1, [[0], [1], [2], [5], [6]]),
        (63, [[0], [1], [2], [5], [6]]),
        (64, [[0, 1], [2], [5, 6]]),
        (96, [[0, 1, 2], [5, 6]]),
    ],
)
def test_a_slice_has_consecutive_experts_up_to_its_size_and_at_least_one(
    max_bytes: int, slices: list[list[int]]
) -> None:
    experts = [
        Param(mca="w{expert}", hf=("experts",), expert=number, stacked=True) for number in (0, 1, 2, 5, 6)
    ]
    specs = {param.mca_name(): ("F32", (2, 4)) for param in experts}  # 32 bytes
    found = list(expert_slices(Unit(experts, frozenset({1})), specs, max_bytes))
    assert [[param.expert for param in unit.params] for unit in found] == slices
    assert [unit.start for unit in found] == [part[0] for part in slices]
