"""`Watch` looks after a run: signals to stop, gradients that are no numbers, skipped steps, speed, ranks that hang.

It neither trains nor saves. The trainer asks it after each step, and an error that it raises ends the run.
"""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import TrainerControl

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_train import groups
from mca_train.checkpoint.loop_state import Due, Totals
from mca_train.engine.engine import StepResult
from mca_train.engine.finite import require_finite, require_finite_weights
from mca_train.groups import Ranks
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meter import LossReport
from mca_train.metrics.stragglers import Stragglers
from mca_train.metrics.throughput import Throughput
from mca_train.trainer.hang_detector import Pulse
from mca_train.trainer.stop_signal import StopSignal

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from mca_models import VirtualModels

logger = logging.getLogger(__name__)

_TOLERATED = 8
"""Skipped steps in a row that no lower loss scale follows, besides the ``hysteresis`` that the scale waits."""


class Watch:
    """Looks after one trainer's run.

    Args:
        args: Training arguments.
        model: `VirtualModels`.
        ranks: This rank.
    """

    def __init__(self, args: TrainingArguments, model: "VirtualModels", ranks: Ranks) -> None:
        self.signal = StopSignal()
        self.pulse = Pulse()
        self.stragglers = Stragglers(ranks)
        self._args = args
        self._model = model
        self._throughput = Throughput(args, model, ranks)
        self._skipped = 0
        self._has_told = False
        self._unhelped = 0
        self._scale = math.inf

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM ended the run."""
        return self.signal.stopped

    def after_step(
        self, result: StepResult, loss: StepLoss, optimizer: "MegatronOptimizer", step: int
    ) -> None:
        """Counts a skipped step.

        Raises:
            McaError: A step that was taken had gradients that are not finite; or one was skipped and no loss scale
                will help.
        """
        if not result.had_targets:
            self._tell_without_target(step)
            return
        if result.updated:
            self._unhelped, self._scale = 0, math.inf
            require_finite(None, result.grad_norm, step, self._model.trained_parameters())
            return
        self._skipped += 1
        scale = float(optimizer.get_loss_scale())
        logger.warning("step %d was skipped: gradients overflowed; the loss scale is %g now", step, scale)
        require_finite_weights(step, self._model.trained_parameters())
        loss_sum = float(groups.sum_over_data(loss.loss_sum[None]))
        helped = scale < self._scale and math.isfinite(loss_sum)
        self._unhelped, self._scale = 0 if helped else self._unhelped + 1, scale
        if self._unhelped >= _TOLERATED + (self._args.hysteresis or 2):
            why = (
                "goes no lower"
                if math.isfinite(loss_sum)
                else f"does not help: the loss itself is {loss_sum}"
            )
            raise McaError(
                f"step {step}: {self._unhelped} steps in a row were skipped, their gradients overflowed and the loss "
                f"scale, {scale:g}, {why}; {self._advice('resume from the last checkpoint with a lower learning_rate')}"
            )

    def _tell_without_target(self, step: int) -> None:
        self._skipped += 1
        if not self._has_told:
            logger.warning(
                "step %d was skipped: its loss is over 0 targets (all labels are -100, or compute_loss counted "
                "nothing), so it moves no weights and is in no mean; skipped_steps counts others like it",
                step,
            )
        self._has_told = True

    def warn_without_targets(self, totals: Totals, steps: int) -> None:
        """Log how many steps of a run had no target, if any."""
        if empty := totals.without_targets:
            logger.warning(
                "%d of %d steps of the run were skipped: their losses are over 0 targets", empty, steps
            )

    def require_updates(self, totals: Totals, steps: int, *, over_tokens: bool) -> None:
        """Refuses the end of a run that has changed nothing.

        Args:
            totals: Of the run.
            steps: Of the run.
            over_tokens: The loss is the mean of target tokens; others may have runs with nothing to learn.

        Raises:
            McaError: All its steps were skipped.
        """
        empty = totals.without_targets
        if empty == steps and over_tokens and steps:
            raise McaError(
                f"all {steps} steps of the run were skipped, no token of their samples is a target: the model has not "
                "changed; give samples labels other than -100"
            )
        if steps > empty and not totals.updates:
            raise McaError(
                f"all {steps} steps of the run were skipped, their gradients overflowed: the model has not changed; "
                f"{self._advice('begin it anew with a lower initial_loss_scale or learning_rate')}"
            )

    def _advice(self, usual: str) -> str:
        if self._args.loss_scale:
            return f"loss_scale is {self._args.loss_scale:g}: lower it, or remove it so that it finds its own"
        return f"{usual}, or train in bf16"

    def stop_if_asked(self, control: TrainerControl, step: int) -> Due:
        """After SIGTERM: save, and no more, on all ranks after the same step; what is then due."""
        due = Due(end_of_epoch=True)
        if self.signal.agreed():
            logger.warning("SIGTERM: saving after step %d, then ending", step)
            due = Due(evaluation=control.should_evaluate, save=control.should_save, end_of_epoch=True)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        return due

    def state(self) -> dict[str, int]:
        """What was counted since the last log, for a checkpoint."""
        return {"skipped": self._skipped}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from `state`."""
        self._skipped = state["skipped"]

    def logs(self, report: LossReport, optimizer: "MegatronOptimizer", step: int) -> dict[str, float]:
        """What a log says besides loss, norm and rate."""
        scaled = self._model.config.dtype == "float16"
        if not scaled:
            require_finite(report.mean, None, step, self._model.trained_parameters())
        found = report.speed() | self._throughput.report(report)
        found |= self.stragglers.report(report.num_steps, found.get("step_time", 0.0), step)
        if scaled:
            found["loss_scale"] = float(optimizer.get_loss_scale())
        if scaled or self._skipped:
            found["skipped_steps"] = self._skipped
        self._skipped = 0
        return found
