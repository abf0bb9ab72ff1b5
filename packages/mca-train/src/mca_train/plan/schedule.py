"""Megatron's pipeline schedules: the order of the passes of a rank, and the simulated timeline of all ranks."""

from collections.abc import Callable, Iterator, Sequence
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


Duration = Callable[[int, Pass], float]


class TimedPass(NamedTuple):
    """Pass on a rank with its start and end."""

    rank: int
    step: Pass
    start: float
    end: float


def timeline(
    orders: Sequence[Sequence[Pass]], chunks: int, duration: Duration, message: float = 0.0
) -> list[TimedPass]:
    """Return all passes of all pipeline ranks with their times.

    Args:
        orders: Passes of each rank in order.
        chunks: Chunks per rank.
        duration: Function from a rank and a pass to seconds.
        message: Seconds until another rank has the output of a pass.
    """
    ranks = len(orders)
    ends: list[dict[Pass, float]] = [{} for _ in orders]
    clocks, places = [0.0] * ranks, [0] * ranks
    ran: list[TimedPass] = []
    waiting = sum(map(len, orders))
    while waiting:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                step = order[places[rank]]
                ready = _ready(rank, step, ranks, chunks, ends, message)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                end = start + duration(rank, step)
                ran.append(TimedPass(rank, step, start, end))
                ends[rank][step] = clocks[rank] = end
                places[rank] += 1
                waiting -= 1
                moved = True
        assert moved, "the orders of the ranks wait for one another"
    return ran


def _ready(
    rank: int, step: Pass, ranks: int, chunks: int, ends: list[dict[Pass, float]], message: float
) -> float | None:
    """Return when the inputs of the pass are available; None: not known yet."""
    before = _before(rank, step, ranks, chunks)
    if before is None:
        return 0.0
    end = ends[before[0]].get(before[1])
    if end is None:
        return None
    return end + (message if before[0] != rank else 0.0)


def _before(rank: int, step: Pass, ranks: int, chunks: int) -> tuple[int, Pass] | None:
    """Return the rank and the pass that produce the input of this pass."""
    forward, chunk, micro_batch = step
    if forward:
        if rank:
            return rank - 1, step
        return (ranks - 1, Pass(True, chunk - 1, micro_batch)) if chunk else None
    if rank < ranks - 1:
        return rank + 1, step
    if chunk < chunks - 1:
        return 0, Pass(False, chunk + 1, micro_batch)
    return rank, Pass(True, chunk, micro_batch)
