"""Position of a run in its data, and its length, in epochs, steps and samples."""

import math
from dataclasses import dataclass, replace

from mca_train.batching.sampling import StepSampler, StepStream
from mca_train.types import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Position of a run in its data, in samples, so that a run can resume with another batch size."""

    epoch: int = 0
    samples: int = 0
    """Samples of this epoch that were trained."""
    epoch_samples: int = 0
    """Samples per epoch; 0: the run has not started."""
    step_samples: int = 0
    """Samples per step; 0: the run has not started."""
    unit: str = ""
    """Unit of the samples: single samples, or packs of some size; empty: the run has not started."""
    order: str = ""
    """Description of the order of samples; empty: unknown."""
    schedule_steps: int = 0
    """Steps made on the learning-rate schedule."""
    extra_steps: int = 0
    """Steps in addition to those computed from epochs and samples; negative if a callback ended an epoch early."""
    epoch_ended: bool = False
    """True if a callback ended this epoch before all samples were used."""

    def after_step(self) -> "RunPosition":
        """Return the position one step later; the last step of an epoch may be short."""
        samples = min(self.samples + self.step_samples, self.epoch_samples)
        return replace(self, samples=samples, schedule_steps=self.schedule_steps + 1)

    def next_epoch(self, skipped_steps: int) -> "RunPosition":
        """Return the start of the next epoch; the last ``skipped_steps`` of this one are not made."""
        extra = self.extra_steps - skipped_steps
        return replace(self, epoch=self.epoch + 1, samples=0, extra_steps=extra, epoch_ended=False)

    def restart_epoch(self, made_steps: int) -> "RunPosition":
        """Return the start of this epoch, whose first ``made_steps`` are made a second time."""
        return replace(self, samples=0, extra_steps=self.extra_steps + made_steps)

    def with_step_samples(self, samples: int) -> "RunPosition":
        """Return the same position with steps of ``samples`` samples."""
        extra = round(self.extra_steps * (self.step_samples or samples) / samples)
        return replace(self, step_samples=samples, extra_steps=extra)


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
        cls, args: TrainingArguments, epoch: StepSampler | StepStream, position: RunPosition, global_step: int
    ) -> "RunLength":
        """Compute the length from ``max_steps``, or else from ``num_train_epochs``, as in Hugging Face.

        If the batch size has changed since the run began, the remaining steps and the schedule are computed as if it
        had always been the current one.

        Args:
            args: Training arguments.
            epoch: Division of an epoch into steps.
            position: Position at which the run resumes.
            global_step: Optimizer steps made so far, some perhaps with another batch size.
        """
        size = epoch.num_steps
        made_in_epoch = size - epoch.steps_after(position.samples)
        made = position.epoch * size + made_in_epoch + position.extra_steps
        if args.max_steps > 0:
            max_steps, schedule_steps, schedule_done = args.max_steps, args.max_steps, global_step
        else:
            schedule_steps = max(math.ceil(args.num_train_epochs * size), 1)
            schedule_done = made
            max_steps = global_step + max(schedule_steps - made, 0)
        return cls(
            steps_per_epoch=size,
            max_steps=max_steps,
            num_epochs=math.ceil((made + max_steps - global_step) / size),
            schedule_steps=schedule_steps,
            schedule_done=schedule_done,
        )
