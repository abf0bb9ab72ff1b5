"""`Logger` sums losses and metrics between two logs of a run, logs them, and checks them.

`loop` decides when; ``metrics`` computes the sums.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count
from math import isclose
from typing import Protocol

from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.sample_consistency import require_same_samples
from mca_train.checkpoint.training_state import LoopState
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.data.token_dataset import Mixture
from mca_train.engine.engine import Engine, StepResult
from mca_train.engine.finite import require_finite_weights
from mca_train.losses.token_loss import StepLoss
from mca_train.metrics.meters import (
    AuxLossMeter,
    LossMeter,
    LossReport,
    MetricAccumulator,
    SourceLosses,
)
from mca_train.trainer.base import HfTrainer, Progress

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


class Logger:
    """Sums between two logs of a run; collective like the trainer.

    Args:
        hf: The trainer.
        checkpoints: Finishes its pending checkpoint before an error ends the run.
        progress: Progress of the run.
    """

    def __init__(self, hf: HfTrainer, checkpoints: CheckpointWriter, progress: Progress) -> None:
        self._hf, self._model, self._watch = hf, hf.model, hf.watch
        self._checkpoints, self._progress = checkpoints, progress
        self.reset()

    def reset(self) -> None:
        """Reset the sums between two logs."""
        self.meter = LossMeter(self._hf.ranks.context_parallel_rank)
        self.metrics = self._new_metrics()
        self._aux_losses = AuxLossMeter(self._model.chunks)
        self._sources = self._new_source_losses(self._hf.train_dataset)
        self._watch.restore({"skipped": 0})

    def _new_metrics(self) -> MetricAccumulator:
        hf = self._hf
        return MetricAccumulator(hf.metric_names, hf.ranks.device, hf.metric_differences, hf.metric_extremes)

    def _new_source_losses(self, dataset: object) -> SourceLosses | None:
        """Return the loss meter of a mixture's sources, if the loss is that of tokens."""
        has_token_loss = not self._hf.metric_names and self._hf.token_values is None
        names = dataset.names if isinstance(dataset, Mixture) and has_token_loss else ()
        return SourceLosses(names, self._hf.ranks.device) if names else None

    @contextlib.contextmanager
    def separate_metrics(self) -> Iterator[MetricAccumulator]:
        """Replace the training metrics by new ones within the block, for an evaluation."""
        training_metrics = self.metrics
        self.metrics = self._new_metrics()
        sources, self._sources = self._sources, None
        try:
            yield self.metrics
        finally:
            self.metrics, self._sources = training_metrics, sources

    def add_tokens(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add the cross entropies of a micro-batch to its sources' losses, in training on a mixture."""
        if self._sources is not None:
            self._sources.add_tokens(losses, batch)

    def add_step(self, loss: StepLoss, batch: StepBatch) -> None:
        """Add the loss of a step."""
        self._aux_losses.add_step()
        self.meter.add(loss, batch)

    def end_step(self, result: StepResult, loss: StepLoss, rate: float, engine: Engine) -> None:
        """Record the result of the step; raise if the run cannot continue."""
        self.metrics.end_step()
        if self._sources is not None:
            self._sources.end_step()
        totals, done = self._progress.totals, self._hf.state.global_step
        totals.grad_norm, totals.rate = result.grad_norm, rate
        totals.updates += result.updated
        totals.without_targets += not result.had_targets
        with self._checkpoints.finishing_on_error():
            self._watch.after_step(result, loss, engine.optimizer, done + 1)
            if engine.assumed_counts and done == self._progress.started_at_step:
                self._require_counts(groups.sum_over_data(loss.targets[None]).tolist(), done + 1, engine)

    def log_step(self, engine: Engine) -> None:
        """Log the means since the last log."""
        report, totals = self.meter.flush(), self._progress.totals
        self.add_up(report, engine)
        logs: dict[str, float] = {"loss": report.mean} if report.losses else {}
        if totals.grad_norm is not None:
            logs["grad_norm"] = totals.grad_norm
        if report.image_tokens:
            logs["image_tokens"] = report.image_tokens
        if report.audio_tokens:
            logs["audio_tokens"] = report.audio_tokens
        if self._sources is not None:
            logs |= self._sources.flush()
        logs |= self.metrics.flush() | self._aux_losses.flush() | {"learning_rate": totals.rate}
        with self._checkpoints.finishing_on_error():
            logs |= self._watch.logs(report, engine.optimizer, self._hf.state.global_step)
        self._hf.log(logs)

    def add_up(self, report: LossReport, engine: Engine) -> None:
        """Check the sums since the last log and add them to the totals of the run."""
        totals, state = self._progress.totals, self._hf.state
        first, last = max(totals.logged, self._progress.started_at_step) + 1, state.global_step
        with self._checkpoints.finishing_on_error():
            if first <= last:
                when = f"step {last}" if first == last else f"steps {first} to {last}"
                require_same_samples(self._hf.ranks, report.checksum, when)
            self._require_counts(report.targets, last, engine)
        totals.loss += sum(report.losses)
        totals.steps += len(report.losses)
        totals.logged = state.global_step
        state.num_input_tokens_seen += report.num_tokens
        self._progress.samples += report.num_samples

    def _require_counts(self, counts: Sequence[float], last: int, engine: Engine) -> None:
        """Raise on all ranks unless `compute_loss` returned the counts that `num_items` predicted.

        Args:
            counts: Loss counts of the steps up to ``last``.
            last: The number of a step.
            engine: Holds the predicted counts.
        """
        assumed, engine.assumed_counts = engine.assumed_counts, []
        for step, actual, expected in zip(count(last, -1), reversed(counts), reversed(assumed), strict=False):
            if not isclose(actual, expected, rel_tol=_ROUNDING):
                raise McaError(
                    f"step {step}: {type(self._hf).__name__}.compute_loss returned the count {actual:g}, num_items "
                    f"{expected:g}, which weights the MoE and MTP losses; "
                    "override num_items to return the count of compute_loss"
                )

    def require_updates(self) -> None:
        """Raise if the run has updated nothing."""
        totals, step = self._progress.totals, self._hf.state.global_step
        with self._checkpoints.finishing_on_error():
            self._watch.require_updates(totals, step, over_tokens=self._hf.is_token_loss)

    def require_trained(self) -> None:
        """Raise if the run has updated nothing, or the model is not finite."""
        step = self._hf.state.global_step
        self._watch.warn_without_targets(self._progress.totals, step)
        self.require_updates()
        require_finite_weights(step, self._model.trained_parameters())

    def loop_state(self) -> LoopState:
        """Return the loop state for a checkpoint; every rank calls this at the same step."""
        meters = {name: meter.state() for name, meter in self._meters().items()}
        progress = self._progress
        return LoopState(
            totals=progress.totals, pending=progress.pending, meters=meters, run_kind=self._hf.run_kind
        )

    def restore(self, state: LoopState) -> None:
        """Continue from the loop state of a checkpoint, or from an empty one."""
        self._progress.samples = 0
        self._progress.totals = state.totals
        for name, meter in self._meters().items():
            if name in state.meters:
                meter.restore(state.meters[name])
        self._progress.samples -= self.meter.samples_before

    def _meters(self) -> dict[str, Meter]:
        """Return the meters by their names in a checkpoint."""
        columns = (*self._hf.metric_names, *self._hf.metric_extremes)
        meters: dict[str, Meter] = {
            "loss": self.meter,
            ",".join((_METRICS_KEY, *columns)): self.metrics,  # the key includes the columns
            "model_losses": self._aux_losses,
            "watch": self._watch,
        }
        if self._sources is not None:
            meters[",".join(self._sources.names)] = self._sources  # the key includes the sources
        return meters
