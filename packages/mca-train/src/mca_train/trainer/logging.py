"""These methods of the Trainer come after a step: they log, evaluate, save, and collect what a checkpoint carries.

The callbacks decide when that is due. How a checkpoint is written is in `saving`.
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
from mca_train.checkpoint.loop_state import Carried, Due
from mca_train.data.mixture import Mixture
from mca_train.engine.engine import StepResult
from mca_train.engine.finite import require_finite_weights
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meter import LossReport
from mca_train.metrics.source_losses import SourceLosses
from mca_train.metrics.step_lines import StepLines
from mca_train.metrics.step_profile import StepProfile
from mca_train.trainer.base import TrainerParts
from mca_train.trainer.evaluation import EvaluationStopped
from mca_train.trainer.hf_shims import has_given_up, telling_metric

logger = logging.getLogger(__name__)

_ROUNDING = 1e-4
"""By how much a sum of many weights in fp32 may differ from the same on another device."""
_UNNAMED = "signals"
"""What the numbers beside the loss are called in a checkpoint; the names of their columns follow."""


class Meter(Protocol):
    """Something that sums up between two logs; both methods are collective."""

    def state(self) -> object:
        """What was summed up, as JSON can hold it."""

    def restore(self, state: Typed) -> None:
        """Goes on from `state`."""


class WithLogs(TrainerParts):
    """Does after a step what callbacks ask for, and after resuming what was not done; collective like the trainer."""

    def _after_update(self, result: StepResult, loss: StepLoss, rate: float) -> None:
        """Notes what the step did; a run that cannot go on ends here."""
        self.signals.end_step()
        if self._sources is not None:
            self._sources.end_step()
        self._totals.grad_norm, self._totals.rate = result.grad_norm, rate
        self._totals.updates += result.updated
        self._totals.without_targets += not result.had_targets
        with self._checkpoint_completed():
            self.watch.after_step(result, loss, self.engine.optimizer, self.state.global_step + 1)
            if self.engine.weighed_by and self.state.global_step == self.started_at_step:
                self._require_number(
                    groups.sum_over_data(loss.targets[None]).tolist(), self.started_at_step + 1
                )

    def _log_evaluate_save(self) -> None:
        """Does what the callbacks asked for."""
        if self.control.should_log and self.state.global_step > self._totals.logged:
            self._log_step()
        new_steps = self.state.global_step > self.started_at_step
        if self.control.should_training_stop and new_steps and not self.watch.stopped:
            self._require_updates()  # before anything is saved or reported as the result
        if self.control.should_evaluate:
            self._evaluate_or_put_off()
        if self.control.should_save:
            self.watch.pulse.now("saving", self.state.global_step)
            with self._meter.pause(), self._checkpoint_completed():
                self._save_checkpoint()
            self.control.should_save = False

    def _evaluate_or_put_off(self) -> None:
        """Evaluates, and says whether to save; SIGTERM ends that, and it is done anew when the run continues."""
        logged, self._can_put_off = len(self.state.log_history), True
        try:
            with telling_metric(self.args):
                with self._meter.pause():
                    metrics = self._evaluate(None, None)
                best = self._determine_best_metric(metrics=metrics, trial=None)
        except EvaluationStopped:
            logger.warning("SIGTERM: saving after step %d, then ending", self.state.global_step)
            del self.state.log_history[logged:]
            self._due = replace(self._due, evaluation=True, save=self.control.should_save)
            self.control.should_save = self.control.should_training_stop = True
            self.control.should_evaluate = False
        else:
            if self.args.save_strategy == "best":
                self.control.should_save = best
        finally:
            self._can_put_off = False

    def _ask_for_log(self) -> None:
        """Has the first and the last step of a run logged, where steps are logged at all."""
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
        logs |= self.signals.flush() | self._model_losses.flush() | {"learning_rate": self._totals.rate}
        with self._checkpoint_completed():
            logs |= self.watch.logs(report, self.engine.optimizer, self.state.global_step)
        self.log(logs)

    def _losses_of_sources(self, dataset: object) -> SourceLosses | None:
        """What collects the losses of a mixture's sources, where the loss is that of tokens."""
        of_tokens = not self.signal_names and self.token_values is None
        names = dataset.names if isinstance(dataset, Mixture) and of_tokens else ()
        return SourceLosses(names, self.ranks.device) if names else None

    def _print_lines(self) -> None:
        """Has lines for people printed instead of the dictionaries of Hugging Face's callbacks, and steps profiled."""
        callbacks = (
            self.callback_handler.callbacks
        )  # Hugging Face's own comes last, after those that were given
        if type(callbacks[-1]) in (ProgressCallback, PrinterCallback):
            callbacks.pop()
            self.add_callback(StepLines(bar=not self.args.disable_tqdm and sys.stderr.isatty()))
        if self.args.profile:
            self.add_callback(StepProfile(self.ranks.rank))

    def _require_number(self, found: Sequence[float], last: int) -> None:
        """Raises unless `compute_loss` returned the numbers that `num_items` had told; all ranks alike.

        Args:
            found: What it returned in the steps up to ``last``.
            last: The number of a step.
        """
        told, self.engine.weighed_by = self.engine.weighed_by, []
        for step, number, known in zip(count(last, -1), reversed(found), reversed(told), strict=False):
            if abs(number - known) > _ROUNDING * max(number, known):
                raise McaError(
                    f"step {step}: {type(self).__name__}.compute_loss returned {number:g} as the number that its sum "
                    f"is over, num_items {known:g}, which weighs the losses of experts and prediction layers; "
                    "override num_items with what compute_loss counts"
                )

    def _require_updates(self) -> None:
        """Raises if the run has changed nothing."""
        with self._checkpoint_completed():
            self.watch.require_updates(self._totals, self.state.global_step, over_tokens=self._is_token_loss)

    def _require_trained(self) -> None:
        """Raises if the run has changed nothing, or broken the model."""
        self.watch.warn_without_targets(self._totals, self.state.global_step)
        self._require_updates()
        require_finite_weights(self.state.global_step, self.model.trained_parameters())

    def _add_up(self, report: LossReport) -> None:
        first, last = max(self._totals.logged, self.started_at_step) + 1, self.state.global_step
        with self._checkpoint_completed():
            if first <= last:
                when = f"step {last}" if first == last else f"steps {first} to {last}"
                require_same_samples(self.ranks, report.checksum, when)
            self._require_number(report.targets, last)
        self._totals.loss += sum(report.losses)
        self._totals.steps += len(report.losses)
        self._totals.logged = self.state.global_step
        self.state.num_input_tokens_seen += report.num_tokens
        self._samples += report.num_samples

    def _end_epoch(self) -> None:
        self._due = Due()
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_evaluate_save()

    def _catch_up(self, due: Due, *, over: bool) -> None:
        """Does what an uninterrupted run did after the step of the checkpoint that this one goes on from.

        Args:
            due: What that was.
            over: Whether the epoch, or the run, ended with that step.
        """
        self._due = Due(end_of_epoch=due.end_of_epoch)
        self.control.should_log = False
        self.control.should_evaluate, self.control.should_save = due.evaluation, due.save
        self._log_evaluate_save()
        if has_given_up(self.callback_handler.callbacks):
            logger.info(
                "early stopping ended the run at step %d; a larger patience continues it",
                self.state.global_step,
            )
            self.control.should_training_stop = True
        if due.end_of_epoch and (over or self.control.should_training_stop) and not self.watch.stopped:
            self._end_epoch()

    def _carried(self) -> Carried:
        """For a checkpoint; every rank calls this at the same step."""
        meters = {name: meter.state() for name, meter in self._meters().items()}
        return Carried(totals=self._totals, due=self._due, meters=meters, run_kind=self.run_kind)

    def _take_up(self, carried: Carried) -> None:
        """Goes on with the numbers of a checkpoint, or from none."""
        self._samples = 0
        self._totals = carried.totals
        if _UNNAMED in carried.meters:  # mca 0.1.0 wrote them, or the run had none
            self.signals.restore(carried.meters[_UNNAMED])
        for name, meter in self._meters().items():
            if name in carried.meters:
                meter.restore(carried.meters[name])
        self._samples -= self._meter.samples_before

    def _meters(self) -> dict[str, Meter]:
        """What is summed up between two logs, by its name in a checkpoint."""
        columns = (*self.signal_names, *self.signal_extremes)
        found: dict[str, Meter] = {
            "loss": self._meter,
            ",".join((_UNNAMED, *columns)): self.signals,  # of other columns they are others
            "model_losses": self._model_losses,
            "watch": self.watch,
        }
        if self._sources is not None:
            found[",".join(self._sources.names)] = self._sources  # of other sources it is another one
        return found

    @contextlib.contextmanager
    def _checkpoint_completed(self) -> Iterator[None]:
        """A block whose errors, alike on all ranks, end the run: what is being written is completed first."""
        try:
            yield
        except McaError:
            self._checkpoints.finish()
            raise
