"""A target tensor cut into stretches that fit a buffer, and the moves clipped to each stretch.

Nothing is read or written here. A chunk is no chunk of a pipeline: it is a stretch of one tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from mca_models.storage.byte_ranges import Gather, Move, clip


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start:stop`` of a target tensor; its moves count their targets from ``start``."""

    start: int
    stop: int
    moves: tuple[Move, ...]
    zeros: tuple[tuple[int, int], ...]


class ChunkCache:
    """Chunks by gather: layers and experts share gathers, so most tensors find theirs ready."""

    def __init__(self, elements: int, *, exactly: bool = False) -> None:
        self.elements, self._exactly = elements, exactly
        self._known: dict[int, tuple[Gather, tuple[Chunk, ...]]] = {}

    def chunks(self, gather: Gather) -> tuple[Chunk, ...]:
        """The chunks of at most ``elements`` that ``gather`` falls into."""
        if id(gather) not in self._known:  # the gather is kept, so its id stays its own
            self._known[id(gather)] = (
                gather,
                tuple((split_exactly if self._exactly else split)(gather, self.elements)),
            )
        return self._known[id(gather)][1]


def split(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Cut ``gather`` every ``elements`` or a little before, where its strided moves are whole."""
    step = elements
    period = lcm(*(move.target_stride for move in gather.moves if move.repeat > 1), 1)
    if period <= elements:
        step -= elements % period
    return split_exactly(gather, step)


def split_exactly(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Cut ``gather`` every ``elements``."""
    for start in range(0, gather.size, elements):
        stop = min(start + elements, gather.size)
        moves = tuple(part for move in gather.moves for part in clip(move, start, stop))
        zeros = tuple(
            (max(a, start) - start, min(b, stop) - start) for a, b in gather.zeros if a < stop and b > start
        )
        yield Chunk(start, stop, moves, zeros)
