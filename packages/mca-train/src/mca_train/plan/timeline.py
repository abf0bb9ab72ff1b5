"""When each pass of a pipeline runs: passes wait for what they take from other ranks and for their own rank."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mca_train.plan.schedule import Pass

Duration = Callable[[int, Pass], float]


class Ran(NamedTuple):
    """A pass on a rank, with its beginning and end."""

    rank: int
    step: Pass
    start: float
    end: float


def timeline(
    orders: Sequence[Sequence[Pass]], chunks: int, duration: Duration, message: float = 0.0
) -> list[Ran]:
    """Every pass of every pipeline rank.

    Args:
        orders: Of each rank.
        chunks: On each rank.
        duration: Of a pass on a rank.
        message: Time from the end of a pass until another rank has what it gives.
    """
    ranks = len(orders)
    ends: list[dict[Pass, float]] = [{} for _ in orders]
    clocks, places = [0.0] * ranks, [0] * ranks
    ran: list[Ran] = []
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
                ran.append(Ran(rank, step, start, end))
                ends[rank][step] = clocks[rank] = end
                places[rank] += 1
                waiting -= 1
                moved = True
        assert moved, "the orders of the ranks wait for one another"
    return ran


def _ready(
    rank: int, step: Pass, ranks: int, chunks: int, ends: list[dict[Pass, float]], message: float
) -> float | None:
    """When the pass has what it takes; None: not yet known."""
    before = _before(rank, step, ranks, chunks)
    if before is None:
        return 0.0
    end = ends[before[0]].get(before[1])
    if end is None:
        return None
    return end + (message if before[0] != rank else 0.0)


def _before(rank: int, step: Pass, ranks: int, chunks: int) -> tuple[int, Pass] | None:
    """The pass that this one takes its input from."""
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
