"""Which rank holds up the others: each rank's own time for its batches and its forward passes.

A step lasts equally long on all ranks, as they wait for each other; what a rank does before it needs the others does
not. Ranks talk only when a log is due. Tensor- and context-parallel neighbours wait for each other within the layers,
so that in forward passes they are slow together, and are named together.
"""

import logging
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mca_train.batching.micro_batch import StepBatch
from mca_train.engine.stopwatch import Stopwatch
from mca_train.groups import Ranks

logger = logging.getLogger(__name__)

_TIMES = 1.3  # of the others' time
_SHARE = 0.1  # of a step's time that is lost
_LEAST = 0.005  # seconds; less is noise
_WHAT = ("to read its batches", "in its forward passes")


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Args:
        rank: Which.
        what: The number of its work in `_WHAT`.
        seconds: Of that work in a step.
        usual: The same of the others.
        alike: How many more are as slow.
    """

    rank: int
    what: int
    seconds: float
    usual: float
    alike: int


class Stragglers:
    """Measures this rank, and compares all of them when a log is due.

    Args:
        ranks: This rank among the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reading = 0.0
        self._reported: int | None = None
        self.forward = Stopwatch(ranks.device)
        """For the forward passes."""

    def reading(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """``batches``; the time that each takes to come is measured."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            self._reading += time.perf_counter() - start
            if batch is None:
                return
            self.forward.begin_step()
            yield batch

    def report(self, steps: int, step_time: float, step: int) -> dict[str, float]:
        """Keys of a log: the slowest rank, if it is slower than the others, and how far it is behind in a step.

        Every rank calls this at the same step; the first one reports it, once for each rank in a row.

        Args:
            steps: Since the last time.
            step_time: Seconds of a step, by this rank's clock.
            step: The last one.
        """
        mine = [self._reading / max(steps, 1), self.forward.read(steps), step_time]
        self._reading = 0.0
        if self._ranks.world_size == 1 or not steps:
            return {}
        box = torch.zeros(self._ranks.world_size, 3, dtype=torch.float64, device=self._ranks.device)
        box[self._ranks.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(box)
        times = box.cpu()  # clocks differ: all ranks must find the same one, as it speaks to the others
        found = slowest(times[:, :2], self._ranks.layout.pp, float(times[:, 2].max()))
        if found is None:
            self._reported = None
            return {}
        if found.rank != self._reported:
            self._warn(found, step)
        return {"slowest_rank": found.rank, "slowest_rank_behind": round(found.seconds - found.usual, 4)}

    def _warn(self, found: Straggler, step: int) -> None:
        self._reported = found.rank
        host = [platform.node()]
        dist.broadcast_object_list(host, src=found.rank, device=self._ranks.device)
        more = f" (and {found.alike} more)" if found.alike else ""
        if self._ranks.is_first:
            logger.warning(
                "step %d: rank %d on %s%s holds up the others: it takes %.3g s %s, they %.3g s",
                step,
                found.rank,
                host[0],
                more,
                found.seconds,
                _WHAT[found.what],
                found.usual,
            )


def slowest(times: torch.Tensor, stages: int, step_time: float) -> Straggler | None:
    """The rank that costs the others most, if any does.

    Args:
        times: ``[ranks, 2]`` seconds of a step: for its batches, which ranks of all stages read alike, and in forward
            passes, in which only ranks of one stage do the same.
        stages: Of the pipeline; ranks of one are neighbours.
        step_time: Seconds of a step.
    """
    found: list[tuple[float, Straggler]] = []
    for what, groups in enumerate((1, stages)):
        by_group = times[:, what].reshape(groups, -1)
        usual = by_group.median(dim=1, keepdim=True).values  # the lower one of two
        behind = by_group - usual
        slow = (behind > max(_SHARE * step_time, _LEAST)) & (by_group > _TIMES * usual)
        if not slow.any():
            continue
        worst = int(torch.where(slow, behind, 0.0).argmax())
        lost = float(behind.flatten()[worst])
        alike = int((slow & (behind > lost / 2)).sum()) - 1
        seconds = float(by_group.flatten()[worst])
        found.append((lost, Straggler(worst, what, seconds, seconds - lost, alike)))
    return max(found, key=lambda item: item[0])[1] if found else None
