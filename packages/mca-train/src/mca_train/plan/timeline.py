"""Simulated timeline of a pipeline: passes wait for their inputs and for earlier passes of their rank."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mca_train.plan.schedule import Pass

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
