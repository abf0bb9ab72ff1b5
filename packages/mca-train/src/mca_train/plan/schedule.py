"""Order of the passes of a pipeline rank in Megatron's schedules."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Pass(NamedTuple):
    """Forward or backward pass of one micro-batch through one chunk."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Order:
    """Parameters of a pipeline schedule.

    Args:
        pp: Pipeline-parallel size.
        vpp: Chunks per pipeline rank.
        micro_batches: Micro-batches per step.
        group: Micro-batches that a chunk runs before the next chunk, with several chunks; None: ``pp``.
    """

    pp: int
    vpp: int
    micro_batches: int
    group: int | None = None

    @property
    def period(self) -> int:
        """Number of micro-batches that cover all phases of a step; more only repeat the middle."""
        return max(4 * self.pp, 2 * (self.group or self.pp))

    @property
    def filling(self) -> int:
        """Number of micro-batches, at most all, that cover the peak of every rank."""
        return self.pp + 1 if self.vpp == 1 else self.period

    def passes(self, rank: int) -> Iterator[Pass]:
        """Yield the passes of pipeline rank ``rank`` in order."""
        forward, backward = _passes(self)
        ahead = min(self._ahead(rank), len(forward))
        yield from forward[:ahead]
        for both in zip(forward[ahead:], backward[: len(forward) - ahead], strict=True):
            yield from both
        yield from backward[len(forward) - ahead :]

    def _ahead(self, rank: int) -> int:
        """Return the number of warm-up forward passes."""
        if self.vpp == 1:
            return self.pp - rank - 1
        return (self.pp - rank - 1) * 2 + (self.vpp - 1) * (self.group or self.pp)

    def table(self) -> Iterator[tuple[int, int]]:
        """Yield the micro-batch and the chunk of each forward pass."""
        size = (self.group or self.pp) if self.vpp > 1 else self.micro_batches
        for first in range(0, self.micro_batches, size):
            for chunk in range(self.vpp):
                for micro_batch in range(first, min(first + size, self.micro_batches)):
                    yield micro_batch, chunk


@lru_cache(maxsize=2)
def _passes(order: Order) -> tuple[list[Pass], list[Pass]]:
    """Return all forward and all backward passes in order, which is the same on every rank."""
    forward = [Pass(True, chunk, micro_batch) for micro_batch, chunk in order.table()]
    return forward, [Pass(False, order.vpp - 1 - chunk, micro_batch) for _, chunk, micro_batch in forward]


@lru_cache(maxsize=128)
def rank_passes(order: Order, rank: int) -> tuple[Pass, ...]:
    """Return all passes of `Order.passes`, cached.

    Plans walk them with balanced and with worst-case routing, and again for other layouts with the same schedule.
    """
    return tuple(order.passes(rank))
