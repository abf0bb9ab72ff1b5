"""Units of parameters that are sent together."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_models.megatron.state.buckets import Unit, expert_slices, plan_buckets
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


@pytest.mark.parametrize(
    ("max_bytes", "filled"),
    [
        (1, [256, 512, 256, 256, 256]),
        (768, [768, 256, 512]),
        (1023, [768, 256, 512]),
        (1024, [1024, 512]),
    ],
)
def test_a_bucket_ends_at_its_limit_or_where_other_ranks_receive(max_bytes: int, filled: list[int]) -> None:
    sizes = {"a": 64, "b": 128, "c": 64, "d": 64, "e": 64}  # of 4 bytes
    params = {name: Param(mca=name, hf=(name,), shape=(size,)) for name, size in sizes.items()}
    specs = {name: ("F32", (size,)) for name, size in sizes.items()}
    units = [Unit([param], frozenset({int(name in "de")})) for name, param in params.items()]
    config: Any = SimpleNamespace(layout=ParallelLayout())
    found = plan_buckets(units, specs, config, max_bytes)
    assert [bucket.nbytes for bucket in found] == filled


def test_all_experts_of_a_unit_count_towards_the_limit() -> None:
    sizes = {"a": 64, "b": 64}  # of 4 bytes
    params = {name: Param(mca=name, hf=(name,), shape=(size,)) for name, size in sizes.items()}
    experts = [
        Param(mca="w{expert}", hf=("experts",), expert=number, stacked=True, shape=(64,))
        for number in range(2)
    ]
    specs = {param.mca_name(): ("F32", (64,)) for param in (*params.values(), *experts)}
    units = [Unit([params["a"]], frozenset()), Unit(experts, frozenset()), Unit([params["b"]], frozenset())]
    config: Any = SimpleNamespace(layout=ParallelLayout())
    found = plan_buckets(units, specs, config, 700)
    assert [bucket.nbytes for bucket in found] == [256, 512, 256]


def test_a_stack_has_no_gaps() -> None:
    experts = [
        Param(mca="w{expert}", hf=("experts",), expert=number, stacked=True, shape=(5,))
        for number in range(2)
    ]
    specs = {param.mca_name(): ("F32", (5,)) for param in experts}
    config: Any = SimpleNamespace(layout=ParallelLayout())
    (bucket,) = plan_buckets([Unit(experts, frozenset())], specs, config, 700)
    assert [slot.start for slot in bucket.slots] == [0, 20]
    assert [entry.shape for entry in bucket.entries] == [(2, 5)]
