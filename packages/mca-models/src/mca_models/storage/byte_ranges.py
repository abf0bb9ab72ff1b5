"""Runs of elements in stored tensors: element numbers compressed to strided moves.

No bytes are touched here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mca_models.weights.arrays import NumpyArray

Shape = tuple[int, ...]


def _reach(count: int, step: int) -> int:
    """Positions from the first of ``count`` elements to the last, ``step`` apart."""
    return (count - 1) * step + 1


class Move(NamedTuple):
    """``repeat`` runs of ``run`` elements from part ``part`` of the source, all counted in elements.

    A run's elements are ``source_step`` and ``target_step`` apart: 1 but where a matrix is transposed.
    """

    part: int
    source: int
    target: int
    run: int
    repeat: int
    source_stride: int
    target_stride: int
    source_step: int = 1
    target_step: int = 1

    @property
    def source_span(self) -> int:
        """Elements from the first that is read to the last."""
        return (self.repeat - 1) * self.source_stride + _reach(self.run, self.source_step)

    @property
    def target_span(self) -> int:
        """Elements from the first that is written to the last."""
        return (self.repeat - 1) * self.target_stride + _reach(self.run, self.target_step)

    @property
    def reads_in_order(self) -> bool:
        """Return whether the elements lie in one run, in order, at the source."""
        return self.source_step == 1 and (self.repeat == 1 or self.source_stride == self.run)

    @property
    def writes_in_order(self) -> bool:
        """Return whether the elements lie in one run, in order, at the target."""
        return self.target_step == 1 and (self.repeat == 1 or self.target_stride == self.run)


def in_unit_steps(move: Move) -> Iterator[Move]:
    """Split ``move`` into moves whose runs are contiguous."""
    if move.source_step == move.target_step == 1:
        yield move
        return
    for k in range(move.run):
        source, target = move.source + k * move.source_step, move.target + k * move.target_step
        yield Move(move.part, source, target, 1, move.repeat, move.source_stride, move.target_stride)


def clip(move: Move, start: int, stop: int) -> Iterator[Move]:
    """The parts of ``move`` whose targets lie in ``start:stop``, counted from ``start``."""
    stride, reach = move.target_stride, (move.run - 1) * move.target_step + 1
    # runs first..last touch the stretch
    first = max(0, (start - move.target - reach) // stride + 1)
    last = min(move.repeat - 1, (stop - 1 - move.target) // stride)
    if first > last:
        return
    if first == last:
        yield from _clip_run(move, first, start, stop)
        return
    begin, end = first, last + 1
    if move.target + first * stride < start:
        yield from _clip_run(move, first, start, stop)
        begin += 1
    if move.target + last * stride + reach > stop:
        end -= 1
    if begin < end:
        yield move._replace(
            source=move.source + begin * move.source_stride,
            target=move.target + begin * stride - start,
            repeat=end - begin,
        )
    if end == last:
        yield from _clip_run(move, last, start, stop)


def _clip_run(move: Move, index: int, start: int, stop: int) -> Iterator[Move]:
    target, step = move.target + index * move.target_stride, move.target_step
    low = max(0, -((target - start) // step))  # elements low..high of the run
    high = min(move.run, -((target - stop) // step))
    if low < high:
        source = move.source + index * move.source_stride + low * move.source_step
        run = high - low
        yield Move(move.part, source, target + low * step - start, run, 1, run, run, move.source_step, step)


@dataclass(frozen=True)
class Gather:
    """Copy plan of one target tensor: moves, and zeros for padding."""

    shape: Shape
    moves: tuple[Move, ...]
    zeros: tuple[tuple[int, int], ...] = ()
    """Ranges of elements, start and stop."""

    @property
    def size(self) -> int:
        """Elements of the target."""
        return prod(self.shape)


def plan_gather(positions: NumpyArray, part: NumpyArray, starts: Sequence[int], block: int) -> Gather:
    """Plan how to fill a target tensor.

    Args:
        positions: For each block number its position in the source, whose parts lie one after the other
            with gaps between them.
        part: The block numbers of the target tensor; -1 is padding.
        starts: Position at which each source part begins.
        block: Elements of one block.
    """
    import numpy as np

    numbers = part.reshape(-1)
    found = np.where(numbers < 0, -1, positions[numbers]) if positions.size else numbers
    padding = found < 0
    joined = np.where(padding[1:], padding[:-1], (np.diff(found) == 1) & ~padding[:-1])
    targets = np.flatnonzero(np.concatenate([[True], ~joined])) if found.size else np.zeros(0, np.int64)
    lengths = np.diff(np.append(targets, found.size))
    sources, padding = found[targets], padding[targets]
    zeros = tuple(
        (int(start) * block, int(start + length) * block)
        for start, length in zip(targets[padding], lengths[padding], strict=True)
    )
    owners = np.searchsorted(starts, sources, "right") - 1
    moves: list[Move] = []
    for index, start in enumerate(starts):
        mine = np.flatnonzero(owners == index)
        runs = np.stack([sources[mine] - start, targets[mine], lengths[mine]]) * block
        moves += (Move(index, *move) for move in strided_runs(runs))
    shape = (*part.shape[:-1], part.shape[-1] * block) if part.ndim else ()
    return Gather(shape, tuple(sorted(moves, key=lambda move: (move.target, move.part))), zeros)


def strided_runs(runs: NumpyArray) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Join runs (rows: source, target, length) of equal length at constant distances; yield the fields of moves."""
    import numpy as np

    count = runs.shape[1]
    if not count:
        return
    steps = np.diff(runs, axis=1)
    # a step begins a new series where it differs from the one before it
    breaks = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    ends = [*breaks.tolist(), count - 1]
    table, step_table = runs.T.tolist(), steps.T.tolist()
    first, series = 0, 0
    while first < count:
        while series < len(ends) and ends[series] <= first:
            series += 1
        source, target, length = table[first]
        # lengths differ, or the source goes back
        if series == len(ends) or step_table[first][2] != 0 or step_table[first][0] < 0:
            yield source, target, length, 1, length, length
            first += 1
            continue
        last = ends[series]  # runs first..last have equal steps
        yield source, target, length, last - first + 1, step_table[first][0], step_table[first][1]
        first = last + 1
