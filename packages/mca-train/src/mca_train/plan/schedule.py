"""The order in which a pipeline rank runs micro-batches through its chunks, as Megatron's schedules have it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one chunk."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Order:
    """What decides it.

    Args:
        pp: Pipeline ranks.
        vpp: Chunks on each.
        micro_batches: Of a step.
        group: With several chunks, how many micro-batches one runs before the next does; None: as many as ``pp``.
    """

    pp: int
    vpp: int
    micro_batches: int
    group: int | None = None

    @property
    def period(self) -> int:
        """So many micro-batches show every moment of a step; with more of them those in the middle repeat."""
        return max(4 * self.pp, 2 * (self.group or self.pp))

    @property
    def filling(self) -> int:
        """So many micro-batches, or all, show the fullest moment of every rank."""
        return self.pp + 1 if self.vpp == 1 else self.period

    def of_rank(self, rank: int) -> Iterator[Pass]:
        """The passes of pipeline rank ``rank``, one after another."""
        forward, backward = _passes(self)
        ahead = min(self._ahead(rank), len(forward))
        yield from forward[:ahead]
        for both in zip(forward[ahead:], backward[: len(forward) - ahead], strict=True):
            yield from both
        yield from backward[len(forward) - ahead :]

    def _ahead(self, rank: int) -> int:
        """Forward passes before the first that a backward pass follows."""
        if self.vpp == 1:
            return self.pp - rank - 1
        return (self.pp - rank - 1) * 2 + (self.vpp - 1) * (self.group or self.pp)

    def table(self) -> Iterator[tuple[int, int]]:
        """Micro-batch and chunk of each forward pass."""
        size = (self.group or self.pp) if self.vpp > 1 else self.micro_batches
        for first in range(0, self.micro_batches, size):
            for chunk in range(self.vpp):
                for micro_batch in range(first, min(first + size, self.micro_batches)):
                    yield micro_batch, chunk


@lru_cache(maxsize=2)
def _passes(order: Order) -> tuple[list[Pass], list[Pass]]:
    """All forward passes and all backward passes in their order, which is the same on every rank."""
    forward = [Pass(True, chunk, micro_batch) for micro_batch, chunk in order.table()]
    return forward, [Pass(False, order.vpp - 1 - chunk, micro_batch) for _, chunk, micro_batch in forward]


@lru_cache(maxsize=128)
def passes_of(order: Order, rank: int) -> tuple[Pass, ...]:
    """All of `Order.of_rank`.

    They are walked with balanced and with the worst routing, and again by layouts that differ elsewhere.
    """
    return tuple(order.of_rank(rank))
