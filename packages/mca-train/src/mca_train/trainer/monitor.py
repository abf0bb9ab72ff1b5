"""`Watch` monitors a run: stop signals, gradients that are not finite, skipped steps, speed, hangs.

The trainer calls it after each step; its errors end the run. `StopSignal` handles SIGTERM, by which schedulers end a
job: all ranks agree on the step to stop after.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import TrainerControl

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_models.megatron import platform
from mca_train import groups
from mca_train.checkpoint.training_state import PendingEvents, Totals
from mca_train.engine.engine import StepResult
from mca_train.engine.finite import require_finite, require_finite_weights
from mca_train.groups import Ranks
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meters import LossReport
from mca_train.metrics.stragglers import Stragglers
from mca_train.metrics.throughput import Throughput
from mca_train.trainer.hang_detector import HangDetector

if TYPE_CHECKING:
    from signal import _HANDLER

    from megatron.core.optimizer import MegatronOptimizer

    from mca_models import VirtualModels

logger = logging.getLogger(__name__)

_TOLERATED = 8
"""Consecutive skipped steps without a lower loss scale that are tolerated, plus ``hysteresis``."""


class Watch:
    """Monitor of one trainer's run.

    Args:
        args: Training arguments.
        model: `VirtualModels`.
        ranks: This rank.
    """

    def __init__(self, args: TrainingArguments, model: "VirtualModels", ranks: Ranks) -> None:
        self.signal = StopSignal()
        self.hang_detector = HangDetector()
        self.stragglers = Stragglers(ranks)
        self._args = args
        self._model = model
        self._throughput = Throughput(args, model, ranks)
        self._skipped = 0
        self._has_warned = False
        self._futile_skips = 0
        self._scale = math.inf

    @property
    def stopped(self) -> bool:
        """Return True if SIGTERM ended the run."""
        return self.signal.stopped

    def after_step(
        self, result: StepResult, loss: StepLoss, optimizer: "MegatronOptimizer", step: int
    ) -> None:
        """Check the result of a step and count skipped steps.

        Raises:
            McaError: A step had gradients that are not finite; or steps are skipped and no loss scale will help.
        """
        if not result.had_targets:
            self._warn_without_target(step)
            return
        if result.updated:
            self._futile_skips, self._scale = 0, math.inf
            require_finite(None, result.grad_norm, step, self._model.trained_parameters())
            return
        self._skipped += 1
        scale = float(optimizer.get_loss_scale())
        logger.warning("step %d was skipped: gradients overflowed; the loss scale is %g now", step, scale)
        require_finite_weights(step, self._model.trained_parameters())
        loss_sum = float(groups.sum_over_data(loss.loss_sum[None]))
        helped = scale < self._scale and math.isfinite(loss_sum)
        self._futile_skips, self._scale = 0 if helped else self._futile_skips + 1, scale
        if self._futile_skips >= _TOLERATED + (self._args.hysteresis or 2):
            why = (
                "goes no lower"
                if math.isfinite(loss_sum)
                else f"does not help: the loss itself is {loss_sum}"
            )
            raise McaError(
                f"step {step}: {self._futile_skips} steps in a row were skipped, their gradients overflowed and the "
                f"loss scale, {scale:g}, {why}; "
                f"{self._advice('resume from the last checkpoint with a lower learning_rate')}"
            )

    def _warn_without_target(self, step: int) -> None:
        self._skipped += 1
        if not self._has_warned:
            logger.warning(
                "step %d was skipped: its loss has 0 targets (all labels are -100, or compute_loss returned a count of "
                "0), so it updates no weights and enters no mean; skipped_steps counts such steps",
                step,
            )
        self._has_warned = True

    def warn_without_targets(self, totals: Totals, steps: int) -> None:
        """Log how many steps of a run had no target, if any."""
        if empty := totals.without_targets:
            logger.warning(
                "%d of %d steps of the run were skipped: their losses have 0 targets", empty, steps
            )

    def require_updates(self, totals: Totals, steps: int, *, over_tokens: bool) -> None:
        """Raise if the run has updated nothing.

        Args:
            totals: Of the run.
            steps: Of the run.
            over_tokens: The loss is the mean of target tokens; other losses may have runs without targets.

        Raises:
            McaError: All steps were skipped.
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
                f"{self._advice('restart it with a lower initial_loss_scale or learning_rate')}"
            )

    def _advice(self, default: str) -> str:
        if self._args.loss_scale:
            return f"loss_scale is {self._args.loss_scale:g}: lower it, or remove it for a dynamic scale"
        return f"{default}, or train in bf16"

    def stop_on_signal(self, control: TrainerControl, step: int) -> PendingEvents:
        """Save and stop on all ranks after the same step if SIGTERM came; return the pending events."""
        pending = PendingEvents(evaluation=control.should_evaluate, end_of_epoch=True)
        if self.signal.agreed():
            return save_and_stop(control, step, pending)
        return replace(pending, evaluation=False)

    def state(self) -> dict[str, int]:
        """Return the counts since the last log, for a checkpoint."""
        return {"skipped": self._skipped}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state`."""
        self._skipped = state["skipped"]

    def logs(self, report: LossReport, optimizer: "MegatronOptimizer", step: int) -> dict[str, float]:
        """Return the log entries besides loss, norm and learning rate."""
        scaled = self._model.config.dtype == "float16"
        if not scaled:
            require_finite(report.mean, None, step, self._model.trained_parameters())
        logs = report.speed() | self._throughput.report(report)
        logs |= self.stragglers.report(report.num_steps, logs.get("step_time", 0.0), step)
        if scaled:
            logs["loss_scale"] = float(optimizer.get_loss_scale())
        if scaled or self._skipped:
            logs["skipped_steps"] = self._skipped
        self._skipped = 0
        return logs


def save_and_stop(control: TrainerControl, step: int, pending: PendingEvents) -> PendingEvents:
    """Request a checkpoint of this step and the end of the run; return ``pending`` with a save that was due."""
    logger.warning("SIGTERM: saving after step %d, then ending", step)
    pending = replace(pending, save=control.should_save)
    control.should_save = control.should_training_stop = True
    control.should_evaluate = False
    return pending


_AGAIN = 1.0  # seconds; launchers and schedulers may both deliver the same signal


class StopSignal:
    """Handles SIGTERM between ``__enter__`` and ``__exit__``, on every rank.

    The first signal requests a stop. One that comes a second or more later ends the process at once, as does SIGINT.
    After each step the ranks start an all-reduce of the request and read that of the step before, so no step waits and
    all ranks stop after the same one. Only the main thread can handle signals.
    """

    def __init__(self) -> None:
        self._received: float | None = None
        self._before: _HANDLER = None
        self._work: dist.Work | None = None
        self._request = torch.zeros(1)
        self.stopped = False
        """True if the ranks agreed to stop."""

    def __enter__(self) -> "StopSignal":
        self._received, self.stopped = None, False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._work is not None and error[0] is None:
            self._work.wait()
        self._work = None
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def agreed(self) -> bool:
        """Return True if all ranks stop after this step; every rank calls this after every step."""
        if dist.get_world_size() == 1:
            self.stopped = self._received is not None
            return self.stopped
        if self._work is not None:
            self._work.wait()
            self.stopped = bool(self._request)
        self._request = torch.tensor([float(self._received is not None)], device=platform.current_device())
        self._work = dist.all_reduce(self._request, dist.ReduceOp.MAX, async_op=True)
        return self.stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and now - self._received > _AGAIN:
            os._exit(128 + number)
        if self._received is None:
            self._received = now
