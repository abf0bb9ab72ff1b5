"""Split of a target tensor into chunks that fit a buffer, with the copy moves of each chunk.

A chunk in mca_convert is a range of elements of one tensor, not a pipeline chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from mca_models.storage.byte_ranges import Gather, Move, clip


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start:stop`` of a target tensor; target positions of its moves are relative to ``start``."""

    start: int
    stop: int
    moves: tuple[Move, ...]
    zeros: tuple[tuple[int, int], ...]


class ChunkCache:
    """Cache of chunks by gather: layers and experts share gathers, so most tensors hit the cache."""

    def __init__(self, elements: int, *, exactly: bool = False) -> None:
        self.elements, self._exactly = elements, exactly
        self._known: dict[int, tuple[Gather, tuple[Chunk, ...]]] = {}

    def chunks(self, gather: Gather) -> tuple[Chunk, ...]:
        """Return the chunks of ``gather`` with at most ``elements`` each."""
        if id(gather) not in self._known:  # the cache keeps the gather alive, so no other object gets its id
            self._known[id(gather)] = (
                gather,
                tuple((split_exactly if self._exactly else split)(gather, self.elements)),
            )
        return self._known[id(gather)][1]


def split(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Split ``gather`` after ``elements`` or slightly fewer, so that strided moves are not split within a period."""
    step = elements
    period = lcm(*(move.target_stride for move in gather.moves if move.repeat > 1), 1)
    if period <= elements:
        step -= elements % period
    return split_exactly(gather, step)


def split_exactly(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Split ``gather`` after every ``elements``."""
    for start in range(0, gather.size, elements):
        stop = min(start + elements, gather.size)
        moves = tuple(part for move in gather.moves for part in clip(move, start, stop))
        zeros = tuple(
            (max(a, start) - start, min(b, stop) - start) for a, b in gather.zeros if a < stop and b > start
        )
        yield Chunk(start, stop, moves, zeros)
