"""The weight algebra: every layout and shard has an exact inverse, in numpy and in torch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mca_models.weights import COLUMN, GATED, ROW, Concat, GroupedHeads, Param, Shard, Transposed

small = st.integers(1, 4)


def numbers(*shape: int) -> Any:
    return np.arange(np.prod(shape)).reshape(shape)


def test_grouped_heads_lay_each_group_together() -> None:
    q, k, v = numbers(4, 1), 10 + numbers(2, 1), 20 + numbers(2, 1)
    (packed,) = GroupedHeads(heads=(2, 1, 1), head_dim=1).pack([q, k, v])
    assert packed[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gated_shard_gives_every_rank_its_share_of_gate_and_of_up() -> None:
    gate_up = numbers(8, 1)
    assert GATED.take(gate_up, 0, 2)[:, 0].tolist() == [0, 1, 4, 5]
    assert GATED.take(gate_up, 1, 2)[:, 0].tolist() == [2, 3, 6, 7]


@given(groups=small, repeat=small, head_dim=small, width=small, as_torch=st.booleans())
def test_grouped_heads_invert(groups: int, repeat: int, head_dim: int, width: int, as_torch: bool) -> None:
    heads = GroupedHeads(heads=(repeat, 1, 1), head_dim=head_dim)
    rows = [groups * n * head_dim for n in heads.heads]
    parts = [numbers(n, width) + 1000 * i for i, n in enumerate(rows)]
    if as_torch:
        parts = [torch.from_numpy(part) for part in parts]
    for part, back in zip(parts, heads.unpack(heads.pack(parts)), strict=True):
        assert (part == back).all()


@given(unit=small, size=small, ratio=st.lists(small, min_size=1, max_size=3), axis=st.sampled_from([0, 1]))
def test_shard_joins_what_it_took(unit: int, size: int, ratio: list[int], axis: int) -> None:
    shard = Shard(axis, segments=tuple(ratio))
    long, short = unit * size * sum(ratio), 3
    whole = numbers(long, short) if axis == 0 else numbers(short, long)
    pieces = [shard.take(whole, rank, size) for rank in range(size)]
    assert sum(piece.size for piece in pieces) == whole.size
    assert (shard.join(pieces) == whole).all()


def test_an_axis_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axis 0 of \(5, 2\) does not divide by 2"):
        COLUMN.take(numbers(5, 2), 0, 2)


def test_transposed_inverts() -> None:
    x = numbers(2, 3)
    (stored,) = Transposed().pack([x])
    assert stored.shape == (3, 2)
    assert (Transposed().unpack([stored])[0] == x).all()


def test_a_stacked_expert_takes_its_own_entry() -> None:
    param = Param(mca="e{expert}", hf=("experts",), shard=ROW, stacked=True, expert=1)
    stacked = numbers(3, 2, 4)
    assert (param.to_mca([stacked], rank=1, size=2) == stacked[1][:, 2:]).all()


@pytest.mark.parametrize("wrong", [Concat((1, 1)), GroupedHeads(heads=(1, 2, 1), head_dim=2)])
def test_a_wrong_layout_is_seen(wrong: Any) -> None:
    parts = [numbers(8, 2), numbers(4, 2) + 100, numbers(4, 2) + 200]
    right = GroupedHeads(heads=(2, 1, 1), head_dim=2)
    back = wrong.unpack(right.pack(parts))
    assert len(back) != len(parts) or any(
        a.shape != b.shape or (a != b).any() for a, b in zip(parts, back, strict=True)
    )
