"""`LastEvaluation`: evaluation of the final model, before reporting callbacks end their runs."""

import logging
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_train.run.summary import best_step
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_train.trainer.trainer import McaTrainer


logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """SIGTERM during the evaluation, raised on all ranks after the same step."""


class LastEvaluation(TrainerCallback):  # type: ignore[misc]
    """Callback that evaluates the final model at the end of training, unless it was evaluated.

    mlflow, trackio and others end their runs in ``on_train_end``, and later logs start another run. So this callback
    must be called before theirs.

    Args:
        trainer: The trainer of the model.
    """

    def __init__(self, trainer: "McaTrainer") -> None:
        self._trainer = trainer
        self._is_running = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Evaluate unless the run was stopped; after a stop during the evaluation, a resumed run repeats it."""
        if self._trainer.watch.stopped or self._is_done(state):
            return
        self._is_running = True
        try:
            self._trainer.evaluate()
        except _Stopped:
            logger.warning("SIGTERM: the last evaluation is skipped until the run is resumed")
            self._trainer.complete_checkpoint()
        finally:
            self._is_running = False

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Raise `_Stopped` if all ranks agree to stop."""
        if self._is_running and self._trainer.watch.signal.agreed():
            raise _Stopped

    def _is_done(self, state: TrainerState) -> bool:
        best = best_step(self._trainer)
        step = state.global_step if best is None else best
        return any("eval_loss" in log and log["step"] == step for log in state.log_history)
