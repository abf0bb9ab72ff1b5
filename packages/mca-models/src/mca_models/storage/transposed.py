"""Moves to or from matrices that are stored with their axes exchanged.

A gather is planned as if the matrices of one side were [rows, columns]; what is stored is [columns, rows].
A move of whole rows becomes one of whole columns: element (row, column), planned at
``row * columns + column``, is stored at ``column * rows + row``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mca_models.storage.byte_ranges import Gather, Move, Shape


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
