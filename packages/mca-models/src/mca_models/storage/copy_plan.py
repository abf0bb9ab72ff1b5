"""Copy plans between checkpoint layouts, from the weight algebra.

A parameter's elements have one order in its HF tensors and another in the shards of each parallel
layout. Running the algebra of ``mca_models.weights`` on arrays of element *numbers* instead of weights
gives the position of each element on either side; comparing the two sides gives the runs to copy. That every
number occurs exactly once on each side is the proof that nothing is lost or doubled.

Only the last axis is long and never looked into by most rules, so it is numbered in a few blocks. That
is checked, not assumed: where a rule takes blocks apart, every element gets its own number.

A side is ``None`` for the HF tensors, or the number of ranks for the shards of a parameter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import NamedTuple

from mca_models.storage.byte_ranges import Gather, Move, Shape, plan_gather
from mca_models.weights import Param
from mca_models.weights.arrays import Array, NumpyArray
from mca_models.weights.layouts import Layout, Transposed
from mca_models.weights.rules import Shard

Side = int | None
HF: Side = None
_MAX_RULES = 4096
_MOST_NUMBERS = 1 << 28  # 2 GiB of them


class _Rectangle(NamedTuple):
    """``height`` rows, ``step`` apart, of ``width`` columns in the untransposed matrix, and where they go."""

    part: int
    row: int
    column: int
    height: int
    width: int
    step: int
    other: int
    """Position of the first element on the other side."""
    other_stride: int
    """From row to row on the other side, where columns lie side by side."""


def transpose_sources(gather: Gather, shapes: Sequence[Shape]) -> Gather:
    """``gather``, whose source parts are planned with ``shapes`` and stored transposed."""
    moves = []
    for move in gather.moves:
        rows, columns = shapes[move.part]
        for block in _rectangles(move, columns, source=True):
            moves.append(
                Move(
                    block.part,
                    source=block.column * rows + block.row,
                    target=block.other,
                    run=block.width,
                    repeat=block.height,
                    source_stride=block.step,
                    target_stride=block.other_stride,
                    source_step=rows,
                )
            )
    return replace(gather, moves=_in_order(moves))


def transpose_targets(gather: Gather) -> Gather:
    """``gather`` into a matrix that is to be stored transposed."""
    rows, columns = gather.shape
    moves = []
    for move in gather.moves:
        for block in _rectangles(move, columns, source=False):
            moves.append(
                Move(
                    block.part,
                    source=block.other,
                    target=block.column * rows + block.row,
                    run=block.height,
                    repeat=block.width,
                    source_stride=1,
                    target_stride=rows,
                    source_step=block.other_stride,
                    target_step=block.step,
                )
            )
    return replace(gather, shape=(columns, rows), moves=_in_order(moves))


def invert_gathers(gathers: Sequence[Gather], shapes: Sequence[Shape]) -> tuple[Gather, ...]:
    """Gathers that bring back what ``gathers`` take from parts of ``shapes``."""
    moves: list[list[Move]] = [[] for _ in shapes]
    for number, gather in enumerate(gathers):
        for move in gather.moves:
            moves[move.part].append(
                move._replace(
                    part=number,
                    source=move.target,
                    target=move.source,
                    source_stride=move.target_stride,
                    target_stride=move.source_stride,
                )
            )
    return tuple(Gather(shape, _in_order(found)) for shape, found in zip(shapes, moves, strict=True))


def _in_order(moves: list[Move]) -> tuple[Move, ...]:
    return tuple(sorted(moves, key=lambda move: (move.target, move.part)))


def _rectangles(move: Move, columns: int, *, source: bool) -> Iterator[_Rectangle]:
    """``move`` as rectangles of the matrix on its ``source`` side, or on that of its target."""
    at, other = (move.source, move.target) if source else (move.target, move.source)
    stride, other_stride = move.source_stride, move.target_stride
    if not source:
        stride, other_stride = other_stride, stride
    row, column = divmod(at, columns)
    if column + move.run <= columns and (move.repeat == 1 or stride % columns == 0):
        step = stride // columns if move.repeat > 1 else 1
        yield _Rectangle(move.part, row, column, move.repeat, move.run, step, other, other_stride)
        return
    for number in range(move.repeat):
        yield from _rows(move.part, at + number * stride, move.run, columns, other + number * other_stride)


def _rows(part: int, start: int, length: int, columns: int, other: int) -> Iterator[_Rectangle]:
    """One run as what it has of its first row, whole rows, and what it has of its last."""
    stop, shift = start + length, other - start
    first = min(-(-start // columns) * columns, stop)
    last = max(first, stop // columns * columns)
    if first > start:
        yield _Rectangle(part, *divmod(start, columns), 1, first - start, 1, other, 1)
    if last > first:
        height = (last - first) // columns
        yield _Rectangle(part, first // columns, 0, height, columns, 1, first + shift, columns)
    if stop > last:
        yield _Rectangle(part, last // columns, 0, 1, stop - last, 1, last + shift, 1)


@dataclass(frozen=True)
class Rule:
    """The part of a ``Param`` that decides where its elements lie; equal for all layers and experts."""

    shard: Shard
    layout: Layout
    hf_layout: Layout
    vocab: bool

    @staticmethod
    def from_param(param: Param) -> "Rule":
        """The rule of ``param``: the same object for parameters that share theirs."""
        key = id(param.shard), id(param.layout), id(param.hf_layout), param.vocab
        rule = _KNOWN_RULES.get(key)
        if rule is None:  # it keeps its parts alive, so their ids stay their own
            if len(_KNOWN_RULES) > _MAX_RULES:
                _KNOWN_RULES.clear()
            rule = _KNOWN_RULES[key] = Rule(param.shard, param.layout, param.hf_layout, param.vocab)
        return rule

    @cached_property
    def _hash(self) -> int:
        return hash((self.shard, self.layout, self.hf_layout, self.vocab))

    def __hash__(self) -> int:
        return self._hash

    def to_full(self, hf: Sequence[Array]) -> Array:
        """Apply ``Param.to_full`` to the tensors' own entries."""
        (whole,) = self.layout.pack(self.hf_layout.unpack(list(hf)))
        return whole

    def parts(self, whole: Array, side: Side) -> list[Array]:
        """The tensors of ``side`` that hold ``whole``; padding rows are numbered -1."""
        if side is None:
            return list(self.hf_layout.pack(self.layout.unpack((whole,))))
        if self.shard.axis is None:
            return [whole]
        padded = _pad(whole, side) if self.vocab else whole
        return [self.shard.take(padded, rank, side) for rank in range(side)]

    @property
    def untransposed(self) -> "Rule | None":
        """The rule that takes HF tensors with their last two axes exchanged back; None if none are."""
        if not isinstance(self.hf_layout, Transposed) or self.vocab:
            return None
        return replace(self, hf_layout=self.hf_layout.inside)


_KNOWN_RULES: dict[tuple[int, int, int, bool], Rule] = {}


def _pad(whole: NumpyArray, size: int) -> NumpyArray:
    import numpy as np

    rows = -whole.shape[0] % size
    return np.concatenate([whole, np.full((rows, *whole.shape[1:]), -1, whole.dtype)]) if rows else whole


@lru_cache(maxsize=1024)
def plan_moves(rule: Rule, whole: Shape, source: Side, target: Side) -> tuple[Gather, ...]:
    """Plan how to fill each tensor of side ``target`` from those of side ``source``.

    Args:
        rule: From ``Rule.from_param``.
        whole: Shape of the whole parameter, without vocabulary padding.
        source: The side to read.
        target: The side to write.

    Raises:
        ValueError: The parameter does not divide as a side demands, or a rule loses elements.
    """
    if source is HF and target is HF:
        return tuple(_copy_all(number, shape) for number, shape in enumerate(part_shapes(rule, whole, HF)))
    if rule.untransposed and HF in (source, target):
        return _plan_transposed(rule.untransposed, whole, source, target)
    numbering = _Numbering(rule, whole, (source, target))
    starts, positions = numbering.positions(source)
    numbering.positions(target)  # checks that the target too holds every element once
    return tuple(
        plan_gather(positions, part, starts, numbering.block_size) for part in numbering.parts(target)
    )


def _copy_all(part: int, shape: Shape) -> Gather:
    size = prod(shape)
    return Gather(shape, (Move(part, 0, 0, size, 1, size, size),) if size else ())


def _plan_transposed(untransposed: Rule, whole: Shape, source: Side, target: Side) -> tuple[Gather, ...]:
    """Plan moves for transposed HF tensors: as if they were not, then transpose each move.

    Numbering a large matrix in blocks works in one direction only; transposed, every element would need
    its own number.
    """
    shapes = part_shapes(untransposed, whole, HF)
    if source is HF:
        return tuple(
            transpose_sources(gather, shapes) for gather in plan_moves(untransposed, whole, HF, target)
        )
    # the other way round: HF rows that alternate between parts are few moves only in this direction
    back = invert_gathers(plan_moves(untransposed, whole, HF, source), shapes)
    return tuple(transpose_targets(gather) for gather in back)


@lru_cache(maxsize=1024)
def part_shapes(rule: Rule, whole: Shape, side: Side) -> tuple[Shape, ...]:
    """The shapes of a side's tensors (an expert's own entries of stacked ones)."""
    if rule.untransposed:
        shapes = part_shapes(rule.untransposed, whole, side)
        return shapes if side is not None else tuple((columns, rows) for rows, columns in shapes)
    numbering = _Numbering(rule, whole, (side,))
    return tuple(numbering.true_shape(part) for part in numbering.parts(side))


class _Numbering:
    """Numbers of a parameter's blocks, and the position of each block on a side.

    A row of the last axis has ``blocks_per_row`` blocks of ``block_size`` elements.
    """

    def __init__(self, rule: Rule, whole: Shape, sides: Sequence[Side]) -> None:
        self.rule, self.whole = rule, whole
        self.blocks_per_row = _blocks_per_row(rule, whole, sides)
        if prod(whole[:-1]) * self.blocks_per_row > _MOST_NUMBERS:
            raise ValueError(
                f"rows of {whole[-1]} do not divide into even parts, and it is too large to move one by one"
            )
        self.block_size = whole[-1] // self.blocks_per_row if whole and whole[-1] else 1

    def parts(self, side: Side) -> list[Array]:
        """Return the tensors of ``side``, with block numbers for blocks."""
        return _numbered_parts(self.rule, self.whole, self.blocks_per_row, side)

    def positions(self, side: Side) -> "tuple[list[int], NumpyArray]":
        """Return where each part starts, and the position of each block; there is a gap of one between parts.

        Raises:
            ValueError: The side does not hold every block once, or the two directions of the rule are not inverse.
        """
        import numpy as np

        count = prod(self.whole) // self.block_size
        positions = np.full(count, -1)
        starts, start, found = [], 0, 0
        for part in self.parts(side):
            numbers = part.reshape(-1)
            places = np.flatnonzero(numbers >= 0)  # without padding
            positions[numbers[places]] = start + places
            found += len(places)
            starts.append(start)
            start += numbers.size + 1
        if found != count or (positions < 0).any():
            raise ValueError(f"the rule does not hold every element of {self.whole} exactly once")
        if side is HF:
            restored = self.rule.to_full(self.parts(HF)).reshape(-1)
            if not np.array_equal(restored, np.arange(count)):
                raise ValueError(f"the rule's two directions are not inverse, for {self.whole}")
        return starts, positions

    def true_shape(self, part: NumpyArray) -> Shape:
        """Return the shape of ``part`` in elements."""
        if self.block_size == 1:
            return tuple(part.shape)
        return (*part.shape[:-1], part.shape[-1] * self.block_size)


def _numbered_parts(rule: Rule, whole: Shape, blocks_per_row: int, side: Side) -> list[Array]:
    import numpy as np

    shape = (*whole[:-1], blocks_per_row) if whole else ()
    return rule.parts(np.arange(prod(shape)).reshape(shape), side)


def _blocks_per_row(rule: Rule, whole: Shape, sides: Sequence[Side]) -> int:
    """Return few blocks if the rule leaves them whole on all ``sides``, else one for each element."""
    if len(whole) < 2:
        return whole[-1] if whole else 1
    is_cut = rule.shard.axis == len(whole) - 1
    shards = lcm(*(side or 1 for side in sides)) * sum(rule.shard.segments) if is_cut else 1
    # pairs in each shard, which stay neighbours if the rule moves it as one; of four or more, an alternation parts some
    fitting = (blocks for blocks in range(2 * shards, whole[-1], 2 * shards) if whole[-1] % blocks == 0)
    if blocks := next((blocks for blocks in fitting if blocks >= 4), 0):
        try:
            if all(_keeps_pairs(_numbered_parts(rule, whole, blocks, side)) for side in sides):
                return blocks
        except ValueError:  # a side does not divide so few blocks
            pass
    return whole[-1]


def _keeps_pairs(parts: Sequence[Array]) -> bool:
    """Return whether blocks 2i and 2i + 1 stay side by side in all ``parts``, so that whole pairs move."""
    for part in parts:
        if part.ndim < 2 or part.shape[-1] % 2:
            return False
        pairs = part.reshape(-1, 2)
        even, odd = pairs[:, 0], pairs[:, 1]
        if not (((even < 0) & (odd < 0)) | ((even % 2 == 0) & (odd == even + 1))).all():
            return False
    return True
