"""These methods of the Trainer evaluate the model: every sample counts once, and training goes on as it was.

When an evaluation is due is decided by the callbacks. What the loss is made of is decided in `compute_loss`.
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
from mca_train.engine.rng import kept_rng
from mca_train.losses.chunked import kept_output
from mca_train.metrics.meter import LossMeter, LossReport
from mca_train.metrics.metric_accumulator import Signals
from mca_train.trainer.dataloaders import WithStepLoaders

logger = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """SIGTERM came during an evaluation; on all ranks after the same step of it."""


class WithEvaluation(WithStepLoaders):
    """Evaluates a trainer's model; collective like the trainer itself."""

    def evaluate(
        self,
        eval_dataset: Samples | dict[str, Samples] | str | None = None,
        ignore_keys: object = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The mean loss over all targets of ``eval_dataset``, every sample counted once; without a target no loss."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            found: dict[str, float] = {}
            for name, part in dataset.items():
                found |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        started = time.time()
        loader = self._evaluation_loader(dataset)
        with self._other_signals() as signals:
            report = self._evaluate_loss(loader)
            metrics = _loss(report, f"{metric_key_prefix}_loss")
            metrics |= {f"{metric_key_prefix}_{name}": mean for name, mean in signals.flush().items()}
        require_same_samples(self.ranks, report.checksum, "evaluation")
        metrics |= speed_metrics(
            metric_key_prefix, started, num_samples=report.num_samples, num_steps=len(loader)
        )
        metrics = self._of_first(metrics)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _of_first(self, metrics: dict[str, float]) -> dict[str, float]:
        """Rank 0's, on every rank: tensor ranks sum in other orders, and might not agree on what is best."""
        return run_on_first_rank(lambda: metrics)

    def _new_signals(self) -> Signals:
        return Signals(self.signal_names, self.ranks.device, self.signal_differences, self.signal_extremes)

    @contextlib.contextmanager
    def _other_signals(self) -> Iterator[Signals]:
        """A block in which `compute_loss` adds to other signals than those of training, which go on after it."""
        of_training = self.signals
        self.signals = self._new_signals()
        sources, self._sources = self._sources, None
        try:
            yield self.signals
        finally:
            self.signals, self._sources = of_training, sources

    def _evaluate_loss(self, loader: DataLoader[StepBatch]) -> LossReport:
        pipeline = self._pipeline
        self.callback_handler.eval_dataloader = loader
        meter = LossMeter(self.ranks.context_parallel_rank)
        other_steps = self.watch.signal.other_steps()
        with kept_rng(), kept_output(self.model.chunks), pipeline.at_rest(), other_steps:
            self._set_output()
            for batch in self._rounds(loader, "evaluation"):
                self.watch.pulse.now("evaluating", self.state.global_step)
                self.before_forward(batch)
                meter.add(pipeline.evaluate(batch), batch)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                if self._can_put_off and self.watch.signal.agreed():
                    raise EvaluationStopped
        return meter.flush()


def _loss(report: LossReport, name: str) -> dict[str, float]:
    """The mean loss of an evaluation, called ``name``; where it is over nothing that is said, and there is none."""
    if targets := sum(report.targets):
        return {name: report.loss_sum / targets}
    logger.warning(
        "the evaluation has no %s: the loss of its %s is over 0 targets (all labels are -100, or compute_loss counted "
        "nothing)",
        name,
        counted(report.num_samples, "sample"),
    )
    return {}
