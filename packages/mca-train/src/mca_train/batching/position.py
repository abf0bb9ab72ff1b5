"""Where a run stands in its data and how long it is, in epochs, steps and samples."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from mca_train.types import TrainingArguments


class Steps(Protocol):
    """How an epoch's samples are cut into steps."""

    @property
    def num_steps(self) -> int:
        """In a whole epoch."""

    def steps_after(self, samples: int) -> int:
        """Steps that remain in an epoch after its first ``samples`` samples."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Where a run stands in its data: in samples, so that it can go on with steps of another size."""

    epoch: int = 0
    samples: int = 0
    """Of this epoch, trained already."""
    of: int = 0
    """Samples in an epoch; 0: the run has not begun."""
    units: str = ""
    """What is counted as a sample: one, or a pack of some size; empty: nobody knows."""
    order: str = ""
    """What decides in which order samples come, in words; empty: nobody knows."""
    batch: int = 0
    """Samples in a step."""
    schedule: int = 0
    """Steps as the learning rate's schedule counts them."""
    extra: int = 0
    """Steps made beside those that epochs and samples say; below 0 where a callback ended an epoch early."""
    ended: bool = False
    """Whether a callback has ended this epoch, of which samples may be left."""

    def after_step(self) -> "RunPosition":
        """A step later; the last one of an epoch may be short."""
        samples = min(self.samples + self.batch, self.of)
        return replace(self, samples=samples, schedule=self.schedule + 1)

    def next_epoch(self, left: int) -> "RunPosition":
        """At the beginning of the next one; ``left`` steps of this one were not made."""
        return replace(self, epoch=self.epoch + 1, samples=0, extra=self.extra - left, ended=False)

    def begun_anew(self, made: int) -> "RunPosition":
        """At the beginning of this epoch, of which ``made`` steps were made already."""
        return replace(self, samples=0, extra=self.extra + made)

    def in_steps_of(self, batch: int) -> "RunPosition":
        """The same place if a step has ``batch`` samples."""
        return replace(self, batch=batch, extra=round(self.extra * (self.batch or batch) / batch))


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
    def of(cls, args: TrainingArguments, steps: Steps, place: RunPosition, done: int) -> "Length":
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
