"""`LastEvaluation` evaluates the model that a run ends with, while those that the run reports to still listen."""

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_train.run.summary import best_step
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_train.trainer.trainer import McaTrainer


class LastEvaluation(TrainerCallback):  # type: ignore[misc]
    """Evaluates once training has ended, unless that model was evaluated.

    mlflow, trackio and others end their runs in ``on_train_end``, and what is logged later begins another run; so
    this callback must be called before theirs.

    Args:
        trainer: Whose model it is.
    """

    def __init__(self, trainer: "McaTrainer") -> None:
        self._trainer = trainer

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Evaluates, if the run was not told to stop."""
        if not self._trainer.watch.stopped and not self._is_done(state):
            self._trainer.evaluate()

    def _is_done(self, state: TrainerState) -> bool:
        best = best_step(self._trainer)
        step = state.global_step if best is None else best
        return any("eval_loss" in log and log["step"] == step for log in state.log_history)
