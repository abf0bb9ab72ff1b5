"""Each arrangement of parts in stored tensors, on a few numbers."""

from typing import Any

import numpy as np
import pytest
import torch

from mca_models.weights import (
    REPLICATED,
    Concat,
    GroupedHeads,
    Interleaved,
    Param,
    PerTensor,
    Separate,
    Shaped,
    Shard,
    SwappedHalves,
    Transposed,
    expand_rules,
)
from mca_models.weights.arrays import split, split_ratio, stack
from mca_models.weights.layouts import FusedRotaryHeads, Layout

COLUMN_OF = [[0], [1], [2], [3]]
CASES: dict[str, tuple[Layout, list[Any], list[Any]]] = {
    "separate": (Separate(), [[[1, 2]], [[3]]], [[[1, 2]], [[3]]]),
    "concat": (Concat((4, 2)), [COLUMN_OF, [[8], [9]]], [[[0], [1], [2], [3], [8], [9]]]),
    "groups": (
        GroupedHeads((2, 1), 2),
        [[0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 12, 13]],
        [[0, 1, 2, 3, 10, 11, 4, 5, 6, 7, 12, 13]],
    ),
    "transposed": (Transposed(Concat((1, 1))), [[[0, 1]], [[2, 3]]], [[[0, 2], [1, 3]]]),
    "three axes": (Transposed(), [[[[0, 1]], [[2, 3]]]], [[[[0], [1]], [[2], [3]]]]),
    "swapped": (SwappedHalves(), [[[0, 1, 2, 3], [4, 5, 6, 7]]], [[[2, 3, 0, 1], [6, 7, 4, 5]]]),
    "shaped": (Shaped((2, -1)), [[0, 1, 2, 3, 4, 5]], [[[0, 1, 2], [3, 4, 5]]]),
    "per tensor": (
        PerTensor(((Concat((1, 1)), 2), (Separate(), 1))),
        [[[0]], [[1]], [[2]]],
        [[[0], [1]], [[2]]],
    ),
    "interleaved": (
        Interleaved(Concat((1, 4))),
        [[[9]], [[0], [1]], [[2], [3]]],
        [[[9], [0], [2], [1], [3]]],
    ),
    "rotary": (
        FusedRotaryHeads(2),
        [COLUMN_OF, [[4], [5], [6], [7]], [[8], [9], [10], [11]]],
        [[[0], [2], [1], [3], [4], [6], [5], [7], [8], [9], [10], [11]]],
    ),
}


@pytest.mark.parametrize("library", [np.array, torch.tensor])
@pytest.mark.parametrize("case", CASES)
def test_parts_lie_in_stored_tensors_as_written(case: str, library: Any) -> None:
    layout, parts, stored = CASES[case]
    packed = layout.pack([library(part) for part in parts])
    assert [x.tolist() for x in packed] == stored
    assert [x.tolist() for x in layout.unpack([library(x) for x in stored])] == parts


def test_sizes_that_do_not_add_up_or_divide_are_named() -> None:
    x = np.zeros((2, 7))
    assert [part.shape for part in split_ratio(np.zeros((2, 9)), 1, (2, 1))] == [(2, 6), (2, 3)]
    with pytest.raises(ValueError, match=r"axis 1 of \(2, 7\) does not divide in the ratio \(2, 1\)"):
        split_ratio(x, 1, (2, 1))
    with pytest.raises(ValueError, match=r"cannot split axis 1 of shape \(2, 7\) into \(3, 3\)"):
        split(x, 1, (3, 3))
    with pytest.raises(ValueError, match=r"axis 1 of \(2, 7\) does not divide by 2 ranks"):
        Shard(1).take(x, 0, 2)


def test_every_rank_has_a_parameter_without_an_axis() -> None:
    whole = np.arange(4)
    assert REPLICATED.take(whole, 1, 2) is whole
    assert REPLICATED.join([whole, whole + 1]) is whole
    assert Shard(0).join([whole]) is whole


def test_rules_are_repeated_for_each_expert_of_each_layer() -> None:
    rules = [
        Param(mca="l{layer}.e{expert}.a", hf=("hf{layer}.{expert}.a",)),
        Param(mca="l{layer}.b", hf=("hf{layer}.b", "hf{layer}.c")),
    ]
    found = list(expand_rules(rules, layers=[3, 5], experts=[0, 1]))
    assert [param.mca_name() for param in found] == [
        *("l3.e0.a", "l3.b", "l3.e1.a", "l3.b", "l5.e0.a", "l5.b", "l5.e1.a", "l5.b")
    ]
    assert found[-1].hf_names() == ("hf5.b", "hf5.c")
    dense = list(expand_rules(rules[1:], layers=range(2)))
    assert [(param.layer, param.expert) for param in dense] == [(0, None), (1, None)]


def test_hf_may_number_a_layer_otherwise() -> None:
    param = Param(mca="l{layer}", hf=("hf{layer}",), layer=2)
    assert (param.mca_name(), param.hf_names()) == ("l2", ("hf2",))
    other = Param(mca="l{layer}", hf=("hf{layer}",), layer=2, hf_layer=0)
    assert (other.mca_name(), other.hf_names()) == ("l2", ("hf0",))


def test_a_stack_has_its_axis_in_front() -> None:
    parts = [np.arange(12).reshape(3, 4), np.arange(12, 24).reshape(3, 4)]
    assert np.array_equal(stack(parts), np.arange(24).reshape(2, 3, 4))
    assert torch.equal(stack([torch.from_numpy(part) for part in parts]), torch.arange(24).view(2, 3, 4))
