"""Position of a run in its data, and its length, in epochs, steps and samples."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from mca_train.types import TrainingArguments


class EpochSteps(Protocol):
    """Division of an epoch into steps."""

    @property
    def num_steps(self) -> int:
        """Steps of a full epoch."""

    def steps_after(self, samples: int) -> int:
        """Return the number of steps left in an epoch after its first ``samples`` samples."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Position of a run in its data, in samples, so that a run can resume with another batch size."""

    epoch: int = 0
    samples: int = 0
    """Samples of this epoch that were trained."""
    of: int = 0
    """Samples per epoch; 0: the run has not started."""
    units: str = ""
    """Unit of the samples: single samples, or packs of some size; empty: unknown."""
    order: str = ""
    """Description of the order of samples; empty: unknown."""
    batch: int = 0
    """Samples per step."""
    schedule: int = 0
    """Steps of the learning-rate schedule."""
    extra: int = 0
    """Steps in addition to those computed from epochs and samples; negative if a callback ended an epoch early."""
    ended: bool = False
    """True if a callback ended this epoch before all samples were used."""

    def after_step(self) -> "RunPosition":
        """Return the position one step later; the last step of an epoch may be short."""
        samples = min(self.samples + self.batch, self.of)
        return replace(self, samples=samples, schedule=self.schedule + 1)

    def next_epoch(self, left: int) -> "RunPosition":
        """Return the start of the next epoch, with ``left`` steps of this one skipped."""
        return replace(self, epoch=self.epoch + 1, samples=0, extra=self.extra - left, ended=False)

    def restart_epoch(self, made: int) -> "RunPosition":
        """Return the start of this epoch, ``made`` steps of which were made already."""
        return replace(self, samples=0, extra=self.extra + made)

    def with_batch_size(self, batch: int) -> "RunPosition":
        """Return the same position with steps of ``batch`` samples."""
        return replace(self, batch=batch, extra=round(self.extra * (self.batch or batch) / batch))


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Length of a run in steps and epochs."""

    steps_per_epoch: int
    max_steps: int
    """Optimizer steps at the end of the run, including those with another batch size."""
    num_epochs: int
    """Epochs that the run enters."""
    schedule_steps: int
    """Steps of the learning-rate schedule."""
    schedule_done: int
    """Steps of the schedule before the resumed one."""

    @classmethod
    def from_arguments(
        cls, args: TrainingArguments, steps: EpochSteps, place: RunPosition, done: int
    ) -> "RunLength":
        """Compute the length from ``max_steps``, or else from ``num_train_epochs``, as in Hugging Face.

        If the batch size has changed since the run began, the remaining steps and the schedule are computed as if it
        had always been the current one.

        Args:
            args: Training arguments.
            steps: Division of an epoch into steps.
            place: Position at which the run resumes.
            done: Optimizer steps made so far.
        """
        size = steps.num_steps
        at = place.epoch * size + size - steps.steps_after(place.samples) + place.extra
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
