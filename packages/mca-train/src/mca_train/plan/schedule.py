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
        forward = list(self._table())
        backward = [(micro_batch, self.vpp - 1 - chunk) for micro_batch, chunk in forward]
        ahead = min(self._ahead(rank), len(forward))
        for step in range(len(forward) + ahead):
            if step < len(forward):
                yield Pass(True, forward[step][1], forward[step][0])
            if step >= ahead:
                yield Pass(False, backward[step - ahead][1], backward[step - ahead][0])

    def _ahead(self, rank: int) -> int:
        """Forward passes before the first that a backward pass follows."""
        if self.vpp == 1:
            return self.pp - rank - 1
        return (self.pp - rank - 1) * 2 + (self.vpp - 1) * (self.group or self.pp)

    def _table(self) -> Iterator[tuple[int, int]]:
        """Micro-batch and chunk of each forward pass."""
        size = (self.group or self.pp) if self.vpp > 1 else self.micro_batches
        for first in range(0, self.micro_batches, size):
            for chunk in range(self.vpp):
                for micro_batch in range(first, min(first + size, self.micro_batches)):
                    yield micro_batch, chunk


@lru_cache(maxsize=1)  # a plan walks each rank's twice: with balanced and with the worst routing
def passes_of(order: Order, rank: int) -> tuple[Pass, ...]:
    """All of `Order.of_rank`."""
    return tuple(order.of_rank(rank))
