"""Trainer methods that run after a step: log, evaluate, save, and collect the loop state for checkpoints.

The callbacks decide when; `saving` writes the checkpoints.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_utils import IntervalStrategy

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_train import groups
from mca_train.batching.sample_consistency import require_same_samples
from mca_train.checkpoint.loop_state import LoopState, PendingEvents
from mca_train.data.mixture import Mixture
from mca_train.engine.engine import StepResult
from mca_train.engine.finite import require_finite_weights
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meter import LossReport
from mca_train.metrics.source_losses import SourceLosses
from mca_train.metrics.step_lines import StepLines
from mca_train.metrics.step_profile import StepProfile
from mca_train.trainer.base import TrainerBase
from mca_train.trainer.evaluation import EvaluationStopped
from mca_train.trainer.hf_shims import is_early_stopped, name_missing_metric

logger = logging.getLogger(__name__)

_ROUNDING = 1e-4
"""Relative difference between fp32 sums of many weights on different devices."""
_METRICS_KEY = "signals"
"""Key of the metrics in a checkpoint; the names of their columns follow."""


class Meter(Protocol):
    """Sums between two logs; both methods are collective."""

    def state(self) -> object:
        """Return the sums as JSON values."""

    def restore(self, state: Typed) -> None:
        """Continue from `state`."""


class LoggingMixin(TrainerBase):
    """Actions of the callbacks after a step, and pending ones after resuming; collective like the trainer."""

    def _after_update(self, result: StepResult, loss: StepLoss, rate: float) -> None:
        """Record the result of the step; raise if the run cannot continue."""
        self.metrics.end_step()
        if self._sources is not None:
            self._sources.end_step()
        self._totals.grad_norm, self._totals.rate = result.grad_norm, rate
        self._totals.updates += result.updated
        self._totals.without_targets += not result.had_targets
        with self._checkpoint_completed():
            self.watch.after_step(result, loss, self.engine.optimizer, self.state.global_step + 1)
            if self.engine.assumed_counts and self.state.global_step == self.started_at_step:
                self._require_counts(
                    groups.sum_over_data(loss.targets[None]).tolist(), self.started_at_step + 1
                )

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save as the callbacks requested."""
        if self.control.should_log and self.state.global_step > self._totals.logged:
            self._log_step()
        new_steps = self.state.global_step > self.started_at_step
        if self.control.should_training_stop and new_steps and not self.watch.stopped:
            self._require_updates()  # before anything is saved or reported as the result
        if self.control.should_evaluate:
            self._evaluate_or_put_off()
        if self.control.should_save:
            self.watch.hang_detector.enter("saving", self.state.global_step)
            with self._meter.pause(), self._checkpoint_completed():
                self._save_checkpoint()
            self.control.should_save = False

    def _evaluate_or_put_off(self) -> None:
        """Evaluate and decide whether to save; after SIGTERM the evaluation is repeated on resume."""
        logged, self._can_put_off = len(self.state.log_history), True
        try:
            with name_missing_metric(self.args):
                with self._meter.pause():
                    metrics = self._evaluate(None, None)
                best = self._determine_best_metric(metrics=metrics, trial=None)
        except EvaluationStopped:
            logger.warning("SIGTERM: saving after step %d, then ending", self.state.global_step)
            del self.state.log_history[logged:]
            self._pending = replace(self._pending, evaluation=True, save=self.control.should_save)
            self.control.should_save = self.control.should_training_stop = True
            self.control.should_evaluate = False
        else:
            if self.args.save_strategy == "best":
                self.control.should_save = best
        finally:
            self._can_put_off = False

    def _request_log(self) -> None:
        """Log the first and the last step of a run, if steps are logged at all."""
        is_end = self.state.global_step in (1, self.state.max_steps)
        if is_end and self.args.logging_strategy == IntervalStrategy.STEPS:
            self.control.should_log = True

    def _log_step(self) -> None:
        report = self._meter.flush()
        self._add_up(report)
        logs: dict[str, float] = {"loss": report.mean} if report.losses else {}
        if self._totals.grad_norm is not None:
            logs["grad_norm"] = self._totals.grad_norm
        if report.image_tokens:
            logs["image_tokens"] = report.image_tokens
        if self._sources is not None:
            logs |= self._sources.flush()
        logs |= self.metrics.flush() | self._aux_losses.flush() | {"learning_rate": self._totals.rate}
        with self._checkpoint_completed():
            logs |= self.watch.logs(report, self.engine.optimizer, self.state.global_step)
        self.log(logs)

    def _new_source_losses(self, dataset: object) -> SourceLosses | None:
        """Return the loss meter of a mixture's sources, if the loss is that of tokens."""
        has_token_loss = not self.metric_names and self.token_values is None
        names = dataset.names if isinstance(dataset, Mixture) and has_token_loss else ()
        return SourceLosses(names, self.ranks.device) if names else None

    def _print_lines(self) -> None:
        """Replace the dictionaries of Hugging Face's callbacks by readable lines; add the profiler."""
        callbacks = self.callback_handler.callbacks  # Hugging Face's own is last, after the user's
        if type(callbacks[-1]) in (ProgressCallback, PrinterCallback):
            callbacks.pop()
            self.add_callback(StepLines(bar=not self.args.disable_tqdm and sys.stderr.isatty()))
        if self.args.profile:
            self.add_callback(StepProfile(self.ranks.rank))

    def _require_counts(self, counts: Sequence[float], last: int) -> None:
        """Raise on all ranks unless `compute_loss` returned the counts that `num_items` predicted.

        Args:
            counts: Loss counts of the steps up to ``last``.
            last: The number of a step.
        """
        assumed, self.engine.assumed_counts = self.engine.assumed_counts, []
        for step, actual, expected in zip(count(last, -1), reversed(counts), reversed(assumed), strict=False):
            if abs(actual - expected) > _ROUNDING * max(actual, expected):
                raise McaError(
                    f"step {step}: {type(self).__name__}.compute_loss returned the count {actual:g}, num_items "
                    f"{expected:g}, which weights the MoE and MTP losses; "
                    "override num_items to return the count of compute_loss"
                )

    def _require_updates(self) -> None:
        """Raise if the run has updated nothing."""
        with self._checkpoint_completed():
            self.watch.require_updates(self._totals, self.state.global_step, over_tokens=self._is_token_loss)

    def _require_trained(self) -> None:
        """Raise if the run has updated nothing, or the model is not finite."""
        self.watch.warn_without_targets(self._totals, self.state.global_step)
        self._require_updates()
        require_finite_weights(self.state.global_step, self.model.trained_parameters())

    def _add_up(self, report: LossReport) -> None:
        first, last = max(self._totals.logged, self.started_at_step) + 1, self.state.global_step
        with self._checkpoint_completed():
            if first <= last:
                when = f"step {last}" if first == last else f"steps {first} to {last}"
                require_same_samples(self.ranks, report.checksum, when)
            self._require_counts(report.targets, last)
        self._totals.loss += sum(report.losses)
        self._totals.steps += len(report.losses)
        self._totals.logged = self.state.global_step
        self.state.num_input_tokens_seen += report.num_tokens
        self._samples += report.num_samples

    def _end_epoch(self) -> None:
        self._pending = PendingEvents()
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_evaluate_save()

    def _catch_up(self, due: PendingEvents, *, over: bool) -> None:
        """Run the pending events of the checkpoint that the run resumes from.

        Args:
            due: The pending events.
            over: The epoch or the run ended with that step.
        """
        self._pending = PendingEvents(end_of_epoch=due.end_of_epoch)
        self.control.should_log = False
        self.control.should_evaluate, self.control.should_save = due.evaluation, due.save
        self._log_evaluate_save()
        if is_early_stopped(self.callback_handler.callbacks):
            logger.info(
                "early stopping ended the run at step %d; a larger patience continues it",
                self.state.global_step,
            )
            self.control.should_training_stop = True
        if due.end_of_epoch and (over or self.control.should_training_stop) and not self.watch.stopped:
            self._end_epoch()

    def _loop_state(self) -> LoopState:
        """Return the loop state for a checkpoint; every rank calls this at the same step."""
        meters = {name: meter.state() for name, meter in self._meters().items()}
        return LoopState(totals=self._totals, due=self._pending, meters=meters, run_kind=self.run_kind)

    def _restore_loop_state(self, state: LoopState) -> None:
        """Continue from the loop state of a checkpoint, or from an empty one."""
        self._samples = 0
        self._totals = state.totals
        if _METRICS_KEY in state.meters:  # written by mca 0.1.0, or without columns
            self.metrics.restore(state.meters[_METRICS_KEY])
        for name, meter in self._meters().items():
            if name in state.meters:
                meter.restore(state.meters[name])
        self._samples -= self._meter.samples_before

    def _meters(self) -> dict[str, Meter]:
        """Return the meters by their names in a checkpoint."""
        columns = (*self.metric_names, *self.metric_extremes)
        meters: dict[str, Meter] = {
            "loss": self._meter,
            ",".join((_METRICS_KEY, *columns)): self.metrics,  # the key includes the columns
            "model_losses": self._aux_losses,
            "watch": self.watch,
        }
        if self._sources is not None:
            meters[",".join(self._sources.names)] = self._sources  # the key includes the sources
        return meters

    @contextlib.contextmanager
    def _checkpoint_completed(self) -> Iterator[None]:
        """Complete the checkpoint that is being written before errors of the block end the run, alike on all ranks."""
        try:
            yield
        except McaError:
            self._checkpoints.finish()
            raise
