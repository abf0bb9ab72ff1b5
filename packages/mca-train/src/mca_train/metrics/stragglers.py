"""Stragglers: each rank's own time for its batches and its forward passes.

A step takes equally long on all ranks, as they wait for each other; the work before a rank needs the others does not.
Ranks communicate only for a log. Tensor- and context-parallel ranks wait for each other within the layers, so they are
slow together in forward passes, and are reported together.
"""

import logging
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mca_train.batching.micro_batch import StepBatch
from mca_train.engine.engine import Stopwatch
from mca_train.groups import Ranks

logger = logging.getLogger(__name__)

_TIMES = 1.3  # times the others' time
_SHARE = 0.1  # of the step time
_LEAST = 0.005  # seconds; less is noise
_WHAT = ("to read its batches", "in its forward passes")


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Args:
        rank: The rank.
        what: Index of the slow work in `_WHAT`.
        seconds: Time of that work per step.
        typical: Median time of the other ranks.
        alike: Number of other ranks that are as slow.
    """

    rank: int
    what: int
    seconds: float
    typical: float
    alike: int


class Stragglers:
    """Timer of this rank that compares all ranks for each log.

    Args:
        ranks: This rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reading = 0.0
        self._reported: int | None = None
        self.forward = Stopwatch(ranks.device)
        """Measures the forward passes."""

    def reading(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """Iterate over ``batches`` and measure the time to read each."""
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
        """Return log keys of the slowest rank, if it is slower than the others, and its delay per step.

        Every rank calls this at the same step. The first rank warns, once for consecutive reports of the same rank.

        Args:
            steps: Steps since the last call.
            step_time: Seconds of a step, by this rank's clock.
            step: The last step.
        """
        local = [self._reading / max(steps, 1), self.forward.read(steps), step_time]
        self._reading = 0.0
        if self._ranks.world_size == 1 or not steps:
            return {}
        box = torch.zeros(self._ranks.world_size, 3, dtype=torch.float64, device=self._ranks.device)
        box[self._ranks.rank] = torch.tensor(local, dtype=torch.float64)
        dist.all_reduce(box)
        times = box.cpu()  # all ranks must select the same one, although clocks differ
        slow = slowest(times[:, :2], self._ranks.layout.pp, float(times[:, 2].max()))
        if slow is None:
            self._reported = None
            return {}
        if slow.rank != self._reported:
            self._warn(slow, step)
        return {"slowest_rank": slow.rank, "slowest_rank_behind": round(slow.seconds - slow.typical, 4)}

    def _warn(self, straggler: Straggler, step: int) -> None:
        self._reported = straggler.rank
        host = [platform.node()]
        dist.broadcast_object_list(host, src=straggler.rank, device=self._ranks.device)
        more = f" (and {straggler.alike} more)" if straggler.alike else ""
        if self._ranks.is_first:
            logger.warning(
                "step %d: rank %d on %s%s holds up the others: it takes %.3g s %s, they %.3g s",
                step,
                straggler.rank,
                host[0],
                more,
                straggler.seconds,
                _WHAT[straggler.what],
                straggler.typical,
            )


def slowest(times: torch.Tensor, stages: int, step_time: float) -> Straggler | None:
    """Return the rank that costs the others most time, if any.

    Args:
        times: ``[ranks, 2]`` seconds per step: for batches, which ranks of all stages read alike, and for forward
            passes, which only ranks of one stage share.
        stages: Pipeline stages; ranks of one are neighbors.
        step_time: Seconds of a step.
    """
    candidates: list[tuple[float, Straggler]] = []
    for what, groups in enumerate((1, stages)):
        by_group = times[:, what].reshape(groups, -1)
        typical = by_group.median(dim=1, keepdim=True).values  # the lower one of two
        behind = by_group - typical
        slow = (behind > max(_SHARE * step_time, _LEAST)) & (by_group > _TIMES * typical)
        if not slow.any():
            continue
        worst = int(torch.where(slow, behind, 0.0).argmax())
        lost = float(behind.flatten()[worst])
        alike = int((slow & (behind > lost / 2)).sum()) - 1
        seconds = float(by_group.flatten()[worst])
        candidates.append((lost, Straggler(worst, what, seconds, seconds - lost, alike)))
    return max(candidates, key=lambda item: item[0])[1] if candidates else None
