"""The arithmetic of a run (epochs and steps) and the losses between two logs."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from mca_train import groups
from mca_train.batches import StepBatch
from mca_train.losses import StepLoss
from mca_train.step_rows import StepRows


class Steps(Protocol):
    """How an epoch's samples are cut into steps."""

    @property
    def num_steps(self) -> int:
        """In a whole epoch."""

    def steps_after(self, samples: int) -> int:
        """Steps that remain in an epoch after its first ``samples`` samples."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run stands in its data: in samples, so that it can go on with steps of another size."""

    epoch: int = 0
    samples: int = 0
    """Of this epoch, trained already."""
    of: int = 0
    """Samples in an epoch; 0: the run has not begun."""
    batch: int = 0
    """Samples in a step."""
    schedule: int = 0
    """Steps as the learning rate's schedule counts them."""

    def after_step(self) -> "Place":
        """A step later; the last one of an epoch may be short."""
        samples = min(self.samples + self.batch, self.of)
        return replace(self, samples=samples, schedule=self.schedule + 1)

    def next_epoch(self) -> "Place":
        """At the beginning of the next one."""
        return replace(self, epoch=self.epoch + 1, samples=0)


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is."""

    steps_per_epoch: int
    max_steps: int
    """Optimizer steps at its end, those with another batch size included."""
    num_epochs: int
    """Epochs begun."""
    schedule_steps: int
    """Steps of the learning rate's schedule."""
    schedule_done: int
    """Of these, where the run goes on."""

    @classmethod
    def of(cls, args: Any, steps: Steps, place: Place, done: int) -> "Length":
        """From ``max_steps``, or from ``num_train_epochs`` where that is not set, as in Hugging Face.

        Where the batch size has changed since the run began, epochs are turned into steps as if it always had
        been this one: for what remains, and for the schedule.

        Args:
            args: Training arguments.
            steps: How an epoch is cut.
            place: Where the run goes on.
            done: Optimizer steps that it has made.
        """
        size = steps.num_steps
        at = place.epoch * size + size - steps.steps_after(place.samples)
        if args.max_steps > 0:
            last, total, at_schedule = args.max_steps, args.max_steps, done
        else:
            total, at_schedule = max(math.ceil(args.num_train_epochs * size), 1), at
            last = done + max(total - at, 0)
        return cls(
            steps_per_epoch=size,
            max_steps=last,
            num_epochs=math.ceil((at + last - done) / size),
            schedule_steps=total,
            schedule_done=at_schedule,
        )


@dataclass
class LossMeter:
    """Collects the steps' losses; ranks talk only when a log is due.

    The loss of a log is the mean of its steps' losses, each a mean over all targets of the global batch.
    """

    context_parallel_rank: int
    _steps: StepRows = field(default_factory=lambda: StepRows(5))
    _since: float = field(default_factory=time.perf_counter)

    def add(self, loss: StepLoss, batch: StepBatch) -> None:
        """One step of this rank. Ranks that share samples count them once."""
        counts = torch.tensor(
            [batch.num_tokens, batch.num_samples, batch.squares],
            dtype=torch.float64,
            device=loss.loss_sum.device,
        )
        counts *= self.context_parallel_rank == 0
        self._steps.add(torch.cat([loss.loss_sum[None], loss.targets[None], counts]))

    def flush(self) -> "LossReport":
        """Sums over all ranks, and begins anew. Every rank calls this at the same step."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        steps = self._steps.flush(groups.sum_over_data)
        losses = steps[:, 0] / steps[:, 1].clamp(min=1)
        return LossReport(
            losses=losses.tolist(),
            loss_sum=float(steps[:, 0].sum()),
            num_targets=int(steps[:, 1].sum()),
            num_tokens=int(steps[:, 2].sum()),
            num_samples=int(steps[:, 3].sum()),
            squares=int(steps[:, 4].sum()),
            seconds=seconds,
        )

    def state(self) -> dict[str, Any]:
        """What was collected since the last log, for a checkpoint. Every rank calls this at the same step."""
        return {"steps": self._steps.of_all_ranks(groups.sum_over_data).tolist(), "seconds": self._seconds()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, on whatever layout it was made."""
        self._steps.restore(state["steps"])
        self._since = time.perf_counter() - float(state["seconds"])

    def _seconds(self) -> float:
        return time.perf_counter() - self._since

    def pause(self) -> "_Pause":
        """A ``with`` block whose time (evaluation, saving) does not count as training."""
        return _Pause(self)


class _Pause:
    def __init__(self, meter: LossMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter._since += time.perf_counter() - self._start


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """What happened since the last log, over all ranks."""

    losses: list[float]
    """Of each step."""
    loss_sum: float
    num_targets: int
    num_tokens: int
    num_samples: int
    squares: int
    """Of the lengths of all sequences, summed."""
    seconds: float

    @property
    def mean(self) -> float:
        """The mean loss."""
        return sum(self.losses) / max(len(self.losses), 1)

    def speed(self) -> dict[str, float]:
        """Tokens and samples per second, all ranks together, and seconds per step."""
        if not self.losses or self.seconds <= 0:
            return {}
        return {
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "samples_per_second": round(self.num_samples / self.seconds, 3),
            "step_time": round(self.seconds / len(self.losses), 4),
        }
