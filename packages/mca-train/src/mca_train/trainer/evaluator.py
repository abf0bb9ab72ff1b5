"""`Evaluator` computes the loss of datasets: every sample counts once, and training continues unchanged.

The callbacks decide when to evaluate; `McaTrainer.compute_loss` computes the loss.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import DataLoader
from transformers.trainer_utils import speed_metrics

from mca_config.printable import counted
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.sample_consistency import require_same_samples
from mca_train.data.token_dataset import Samples
from mca_train.metrics.meters import LossMeter, LossReport
from mca_train.trainer.base import HfTrainer
from mca_train.trainer.loaders import StepLoaders
from mca_train.trainer.logger import Logger
from mca_train.trainer.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """SIGTERM during an evaluation; raised on all ranks after the same step."""


class Evaluator:
    """Evaluation of a trainer's model; collective like the trainer itself.

    Args:
        hf: The trainer.
        runner: Runs the model.
        data: The trainer's loaders.
        log: Logger whose custom metrics `McaTrainer.compute_loss` adds to.
    """

    def __init__(self, hf: HfTrainer, runner: ModelRunner, data: StepLoaders, log: Logger) -> None:
        self._hf, self._watch, self._runner, self._data, self._logger = hf, hf.watch, runner, data, log
        self._stops_on_signal = False

    @contextmanager
    def stopping_on_signal(self) -> Iterator[None]:
        """Let SIGTERM end an evaluation in the block, which is repeated on resume, with `EvaluationStopped`."""
        self._stops_on_signal = True
        try:
            yield
        finally:
            self._stops_on_signal = False

    def evaluate(self, dataset: Samples | str | None, prefix: str) -> dict[str, float]:
        """Return the mean loss over all targets of one dataset, and log it; ``prefix`` of the metrics' names."""
        hf, started = self._hf, time.time()
        loader = self._data.evaluation(dataset)
        with self._logger.separate_metrics() as custom_metrics:
            report = self._run(loader)
            metrics = _loss(report, f"{prefix}_loss")
            metrics |= {f"{prefix}_{name}": mean for name, mean in custom_metrics.flush().items()}
        require_same_samples(hf.ranks, report.checksum, "evaluation")
        metrics |= speed_metrics(prefix, started, num_samples=report.num_samples, num_steps=len(loader))
        own = metrics
        metrics = run_on_first_rank(lambda: own)  # sums in other orders may disagree on the best model
        hf.log(dict(metrics))
        hf.fire("on_evaluate", metrics)
        return metrics

    def _run(self, loader: DataLoader[StepBatch]) -> LossReport:
        hf, watch = self._hf, self._watch
        hf.callback_handler.eval_dataloader = loader
        meter = LossMeter(hf.ranks.context_parallel_rank)
        with self._runner.evaluating() as pipeline:
            for batch in self._data.rounds(loader, "evaluation"):
                watch.hang_detector.enter("evaluating", hf.state.global_step)
                hf.before_forward(batch)
                meter.add(pipeline.evaluate(batch), batch)
                hf.fire("on_prediction_step")
                if self._stops_on_signal and watch.signal.agreed():
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
