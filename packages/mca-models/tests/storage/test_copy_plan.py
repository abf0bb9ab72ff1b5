"""Byte moves against the algebra itself, for random shapes, rules and layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_models.storage.copy_plan import (
    HF,
    Rule,
    Side,
    _blocks_per_row,
    _keeps_pairs,
    _Numbering,
    part_shapes,
    plan_moves,
)
from mca_models.storage.source import copy_move
from mca_models.weights import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    Concat,
    GroupedHeads,
    Param,
    Separate,
    Shard,
    Transposed,
)


def fill(gather, sources: list[np.ndarray]) -> np.ndarray:
    out = np.full(gather.size, -7, sources[0].dtype)
    for start, stop in gather.zeros:
        out[start:stop] = 0
    for move in gather.moves:
        copy_move(sources[move.part].reshape(-1), out, move)
    return out.reshape(gather.shape)


def pieces(param: Param, hf: list[np.ndarray], side: Side) -> list[np.ndarray]:
    if side is None:
        return hf
    whole = param.to_full(hf)
    if param.vocab and -whole.shape[0] % side:
        whole = np.concatenate([whole, np.zeros((-whole.shape[0] % side, *whole.shape[1:]), whole.dtype)])
    return [
        param.shard.take(whole, rank, side) for rank in range(side if param.shard.axis is not None else 1)
    ]


def check(param: Param, hf: list[np.ndarray], sides: list[Side]) -> None:
    rule = Rule.from_param(param)
    whole = param.to_full(hf).shape
    for source in sides:
        held = pieces(param, hf, source)
        assert part_shapes(rule, whole, source) == tuple(x.shape for x in held)
        for target in sides:
            expected = pieces(param, hf, target)
            gathers = plan_moves(rule, whole, source, target)
            assert len(gathers) == len(expected)
            for gather, piece in zip(gathers, expected, strict=True):
                assert np.array_equal(fill(gather, held), piece)
                assert all(min(move.run, move.repeat) > 0 for move in gather.moves)


def numbered(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    start, arrays = 1, []
    for shape in shapes:
        size = int(np.prod(shape))
        arrays.append(np.arange(start, start + size).reshape(shape))
        start += size
    return arrays


sizes = st.sampled_from([1, 2, 3, 4, 6])


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 3),
    per=st.integers(1, 3),
    dim=st.integers(1, 4),
    columns=st.integers(1, 40),
    data=st.data(),
)
def test_grouped_heads(groups: int, per: int, dim: int, columns: int, data) -> None:
    layout = GroupedHeads(heads=(per, 1, 1), head_dim=dim)
    rows = groups * (per + 2) * dim
    sides = [HF, *data.draw(st.lists(st.sampled_from([n for n in range(1, 7) if rows % n == 0]), max_size=2))]
    param = Param(mca="x", hf=("q", "k", "v"), layout=layout, shard=COLUMN)
    heads = (groups * per * dim, groups * dim, groups * dim)
    check(param, numbered(*((n, columns) for n in heads)), sides)
    check(param, numbered(*((n,) for n in heads)), sides)  # biases


@settings(max_examples=60, deadline=None)
@given(unit=st.integers(1, 5), columns=st.integers(1, 40), first=sizes, second=sizes)
def test_gated(unit: int, columns: int, first: int, second: int) -> None:
    rows = 12 * unit
    param = Param(mca="x", hf=("gate", "up"), layout=Concat((1, 1)), shard=GATED)
    check(param, numbered((rows, columns), (rows, columns)), [HF, first, second])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), unit=st.integers(1, 5), first=sizes, second=sizes)
def test_row_parallel(rows: int, unit: int, first: int, second: int) -> None:
    check(Param(mca="x", hf=("x",), shard=ROW), numbered((rows, 12 * unit)), [HF, first, second])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 9), first=sizes, second=sizes)
def test_vocabulary_of_any_size(rows: int, columns: int, first: int, second: int) -> None:
    param = Param(mca="x", hf=("x",), shard=COLUMN, vocab=True)
    check(param, numbered((rows, columns)), [HF, first, second])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    first=sizes,
    shard=st.sampled_from([COLUMN, ROW, GATED]),
)
def test_transposed(rows: int, columns: int, first: int, shard) -> None:
    param = Param(mca="x", hf=("x",), shard=shard, hf_layout=Transposed())
    check(param, numbered((24 * rows, 24 * columns)), [HF, first])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    first=sizes,
    second=sizes,
    parts=st.integers(1, 3),
    shard=st.sampled_from([COLUMN, ROW]),
)
def test_transposed_with_parts_that_alternate(
    rows: int, columns: int, first: int, second: int, parts: int, shard
) -> None:
    halves = Concat((1,) * parts)
    turned = Transposed(GroupedHeads((1,) * parts, 1))
    param = Param(mca="x", hf=("x",), shard=shard, layout=halves, hf_layout=turned)
    check(param, numbered((12 * rows, 12 * parts * columns)), [HF, first, second])


def test_large_transposed_tensors_take_few_moves() -> None:
    turned = Transposed(GroupedHeads((1, 1), 1))
    param = Param(mca="x", hf=("x",), shard=GATED, layout=Concat((1, 1)), hf_layout=turned)
    for source, target in ((HF, 8), (8, HF)):
        gathers = plan_moves(Rule.from_param(param), (5760, 2880), source, target)
        assert sum(len(gather.moves) for gather in gathers) == 16


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 0), (0, 4), (2, 3, 5), (2, 8, 1)])
def test_replicated_shapes_of_every_rank(shape: tuple[int, ...]) -> None:
    check(Param(mca="x", hf=("x",), shard=REPLICATED), numbered(shape), [HF, 1])


def test_large_tensors_take_few_moves() -> None:
    qkv = GroupedHeads(heads=(16, 1, 1), head_dim=128)
    param = Param(mca="x", hf=("q", "k", "v"), layout=qkv, shard=COLUMN)
    gathers = plan_moves(Rule.from_param(param), (18432, 2048), HF, 8)
    assert [len(gather.moves) for gather in gathers] == [3] * 8
    row = plan_moves(Rule.from_param(Param(mca="x", hf=("x",), shard=ROW)), (2048, 53248), HF, 8)
    assert [len(gather.moves) for gather in row] == [1] * 8
    assert row[1].moves[0].run == 53248 // 8 and row[1].moves[0].repeat == 2048


class _Forgetful(Separate):
    def pack(self, parts):
        return tuple(part[:-1] for part in parts)


class _Doubling(Separate):
    def unpack(self, stored):
        return tuple(np.concatenate([x, x]) for x in stored)


@pytest.mark.parametrize("layout", [_Forgetful(), _Doubling()])
def test_a_rule_that_loses_or_doubles_elements_is_refused(layout) -> None:
    with pytest.raises(ValueError, match=r"exactly once|not inverse"):
        plan_moves(Rule.from_param(Param(mca="x", hf=("x",), hf_layout=layout)), (6, 4), HF, 1)


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        plan_moves(Rule.from_param(Param(mca="x", hf=("x",), shard=ROW)), (6, 4), HF, 3)


@dataclass(frozen=True)
class EvenColumnsFirst:
    """Stored matrix with the columns 0, 2, 4, ... before the columns 1, 3, 5, ..."""

    def pack(self, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(np.concatenate([part[..., ::2], part[..., 1::2]], -1) for part in parts)

    def unpack(self, stored: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        halves = [np.split(matrix, 2, -1) for matrix in stored]
        return tuple(np.stack(both, -1).reshape(*both[0].shape[:-1], -1) for both in halves)


@pytest.mark.parametrize("shard", [REPLICATED, COLUMN, ROW])
def test_columns_that_change_their_order_are_moved_one_by_one(shard: Shard) -> None:
    param = Param(mca="x", hf=("x",), shard=shard, hf_layout=EvenColumnsFirst())
    check(param, numbered((4, 48)), [HF, 1, 2, 4])
    check(param, numbered((4, 54)), [HF, 1] if shard == ROW else [HF, 1, 2, 4])  # 54 is no multiple of 4


def test_rows_whose_length_is_no_multiple_of_four_move_in_blocks() -> None:
    embedding = Rule.from_param(Param(mca="x", hf=("x",), shard=COLUMN))
    assert len(plan_moves(embedding, (131072, 2054), HF, 4)) == 4  # one by one, it would be too large


@pytest.mark.parametrize(
    ("whole", "shard", "sides", "blocks"),
    [
        ((), REPLICATED, [HF, 1], 1),
        ((7,), COLUMN, [HF, 1], 7),
        ((4, 48), REPLICATED, [HF, 1], 4),
        ((4, 48), COLUMN, [HF, 4], 4),
        ((4, 48), ROW, [HF, 2], 4),
        ((4, 48), ROW, [2, 4], 8),
        ((4, 48), ROW, [2, 3], 12),
        ((4, 48), Shard(1, segments=(1, 2)), [HF, 2], 12),
        ((4, 54), REPLICATED, [HF, 1], 6),
        ((4, 54), ROW, [HF, 2], 54),
        ((4, 4), REPLICATED, [HF, 1], 4),
        ((2, 3, 8), REPLICATED, [HF, 1], 4),
        ((2, 8, 6), REPLICATED, [HF, 1], 6),
        ((4, 0), REPLICATED, [HF, 1], 0),
    ],
)
def test_a_row_has_few_blocks_that_every_side_keeps_whole(
    whole: tuple[int, ...], shard: Shard, sides: list[Side], blocks: int
) -> None:
    """Blocks come in pairs, for each shard of a row and each of its segments."""
    rule = Rule.from_param(Param(mca="x", hf=("x",), shard=shard))
    assert _blocks_per_row(rule, whole, sides) == blocks


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([[[0, 1, 2, 3]]], True),
        ([[[2, 3]], [[0, 1]]], True),
        ([[[-1, -1, 0, 1]]], True),  # zeros
        ([[[0, 2, 1, 3]]], False),
        ([[[0, 3]]], False),
        ([[[1, 2]]], False),
        ([[[-1, 0]]], False),
        ([[[0, 1, 2]]], False),
        ([[0, 1]], False),
    ],
)
def test_pairs_of_blocks_are_kept_if_each_begins_at_an_even_one(
    parts: list[list[list[int]]], kept: bool
) -> None:
    assert _keeps_pairs([np.array(part) for part in parts]) == kept


@pytest.mark.parametrize("blocks", [(6,), (2, 6), (5, 2, 6)])
def test_blocks_of_a_part_are_along_its_last_axis(blocks: tuple[int, ...]) -> None:
    numbering: Any = SimpleNamespace(block_size=1)
    assert _Numbering.true_shape(numbering, np.zeros(blocks)) == blocks
    numbering.block_size = 4
    assert _Numbering.true_shape(numbering, np.zeros(blocks)) == (*blocks[:-1], 24)
