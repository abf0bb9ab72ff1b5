"""Trainer methods that evaluate the model: every sample counts once, and training continues unchanged.

The callbacks decide when to evaluate; `compute_loss` computes the loss.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from torch.utils.data import DataLoader
from transformers.trainer_utils import speed_metrics

from mca_config.printable import counted
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.sample_consistency import require_same_samples
from mca_train.data.token_dataset import Samples
from mca_train.engine.rng import preserved_rng
from mca_train.losses.chunked import preserved_output
from mca_train.metrics.meter import LossMeter, LossReport
from mca_train.metrics.metric_accumulator import MetricAccumulator
from mca_train.trainer.dataloaders import DataLoaderMixin

logger = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """SIGTERM during an evaluation; raised on all ranks after the same step."""


class EvaluationMixin(DataLoaderMixin):
    """Evaluation of a trainer's model; collective like the trainer itself."""

    def evaluate(
        self,
        eval_dataset: Samples | dict[str, Samples] | str | None = None,
        ignore_keys: object = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the mean loss over all targets of ``eval_dataset``, every sample counted once."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return metrics
        started = time.time()
        loader = self._evaluation_loader(dataset)
        with self._evaluation_metrics() as custom_metrics:
            report = self._evaluate_loss(loader)
            metrics = _loss(report, f"{metric_key_prefix}_loss")
            metrics |= {f"{metric_key_prefix}_{name}": mean for name, mean in custom_metrics.flush().items()}
        require_same_samples(self.ranks, report.checksum, "evaluation")
        metrics |= speed_metrics(
            metric_key_prefix, started, num_samples=report.num_samples, num_steps=len(loader)
        )
        metrics = self._from_first_rank(metrics)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _from_first_rank(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return rank 0's metrics on every rank: sums in other orders may disagree on the best model."""
        return run_on_first_rank(lambda: metrics)

    def _new_metrics(self) -> MetricAccumulator:
        return MetricAccumulator(
            self.metric_names, self.ranks.device, self.metric_differences, self.metric_extremes
        )

    @contextlib.contextmanager
    def _evaluation_metrics(self) -> Iterator[MetricAccumulator]:
        """Replace the training metrics by new ones within the block."""
        training_metrics = self.metrics
        self.metrics = self._new_metrics()
        sources, self._sources = self._sources, None
        try:
            yield self.metrics
        finally:
            self.metrics, self._sources = training_metrics, sources

    def _evaluate_loss(self, loader: DataLoader[StepBatch]) -> LossReport:
        pipeline = self._pipeline
        self.callback_handler.eval_dataloader = loader
        meter = LossMeter(self.ranks.context_parallel_rank)
        with preserved_rng(), preserved_output(self.model.chunks), pipeline.params_gathered():
            self._set_output()
            for batch in self._rounds(loader, "evaluation"):
                self.watch.hang_detector.enter("evaluating", self.state.global_step)
                self.before_forward(batch)
                meter.add(pipeline.evaluate(batch), batch)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                if self._can_put_off and self.watch.signal.agreed():
                    raise EvaluationStopped
        return meter.flush()


def _loss(report: LossReport, name: str) -> dict[str, float]:
    """Return the mean loss of an evaluation under ``name``; empty, with a warning, if it has no targets."""
    if targets := sum(report.targets):
        return {name: report.loss_sum / targets}
    logger.warning(
        "the evaluation has no %s: the loss of its %s is over 0 targets (all labels are -100, or compute_loss counted "
        "nothing)",
        name,
        counted(report.num_samples, "sample"),
    )
    return {}
