"""What is looked after beside a run: signals to stop, gradients that are no numbers, skipped steps, speed."""

import logging
from typing import Any

from mca_train.groups import Ranks
from mca_train.numerics import require_finite
from mca_train.progress import LossReport
from mca_train.stop_signal import StopSignal
from mca_train.throughput import Throughput

logger = logging.getLogger(__name__)


class Watch:
    """Looks after one trainer's run.

    Args:
        args: Training arguments.
        model: `VirtualModels`.
        ranks: This rank.
    """

    def __init__(self, args: Any, model: Any, ranks: Ranks) -> None:
        self.signal = StopSignal()
        self._args = args
        self._model = model
        self._throughput = Throughput(args, model, ranks)
        self._skipped = 0

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM ended the run."""
        return self.signal.stopped

    def after_step(self, updated: bool, grad_norm: float | None, step: int) -> None:
        """Counts a skipped step; raises if a step that was taken had gradients that are not finite."""
        if updated:
            require_finite(None, grad_norm, step, self._model.held())
            return
        self._skipped += 1
        logger.warning("step %d was skipped: gradients overflowed, the loss scale goes down", step)

    def stop_if_asked(self, control: Any, step: int) -> None:
        """After SIGTERM: log, save, and no more, on all ranks after the same step."""
        if self.signal.agreed():
            logger.warning("SIGTERM: saving after step %d, then ending", step)
            control.should_log = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def logs(self, report: LossReport, optimizer: Any, step: int) -> dict[str, float]:
        """What a log says besides loss, norm and rate."""
        if not self._args.fp16:
            require_finite(report.mean, None, step, self._model.held())
        found = report.speed() | self._throughput.report(report)
        if self._args.fp16:
            found |= {"loss_scale": float(optimizer.get_loss_scale()), "skipped_steps": self._skipped}
        self._skipped = 0
        return found
