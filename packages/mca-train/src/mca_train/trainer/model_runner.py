"""`ModelRunner`: forward passes of a trainer's model, and Megatron's engine once `train` has started."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mca_config.errors import McaError
from mca_models.megatron.log_probs.chunks import preserved_output
from mca_train.checkpoint.model import load_weights
from mca_train.engine.engine import Engine, Pipeline
from mca_train.engine.optimizer import select_trained_parts
from mca_train.engine.rng import preserved_rng
from mca_train.losses.loss_inputs import chunk_losses, smooth_labels
from mca_train.losses.token_loss import LossFunction
from mca_train.lr_schedule import LearningRate, run_rate
from mca_train.trainer.base import HfTrainer


@dataclass(frozen=True)
class Training:
    """Engine and learning rate of a started run."""

    engine: Engine
    rate: LearningRate


class ModelRunner:
    """Runs a model forward, and trains it once `start` was called.

    Args:
        hf: The trainer.
        loss: Function from the last stage's output to the loss.
    """

    def __init__(self, hf: HfTrainer, loss: LossFunction) -> None:
        self._model, self._args, self._hf, self._loss = hf.model, hf.args, hf, loss
        self._training: Training | None = None
        self.set_output()
        self._forward = Pipeline(list(hf.model.chunks), loss, wants_logits=hf.wants_logits)

    @property
    def pipeline(self) -> Pipeline:
        """Return the engine if there is one, else the pipeline of forward passes."""
        return self._forward if self._training is None else self._training.engine

    @property
    def training(self) -> Training:
        """Return engine and learning rate.

        Raises:
            McaError: `start` was not called yet.
        """
        if self._training is None:
            raise McaError(
                "trainer.engine exists once train() has started; before that, the weights are the model's own and "
                "need no params_gathered() or reload_main_params()"
            )
        return self._training

    def require_active_engine(self) -> None:
        """Raise if another trainer's engine has wrapped the model since.

        Raises:
            McaError: The model has the gradients of another engine.
        """
        if self._training is not None:
            self._training.engine.require_active_engine()

    def set_output(self) -> None:
        """Set the output of the chunk with the loss, which another trainer may have changed."""
        args, model, hf = self._args, self._model, self._hf
        smooth_labels(model.chunks, args.label_smoothing_factor, model.config.vocab_size)
        chunk_losses(
            model.chunks,
            args.loss_chunk_size,
            wants_logits=hf.wants_logits,
            values=hf.token_values,
            vocab_size=model.config.vocab_size,
        )

    @contextmanager
    def evaluating(self) -> Iterator[Pipeline]:
        """Return the pipeline for an evaluation, after which training continues unchanged."""
        pipeline = self.pipeline
        with preserved_rng(), preserved_output(self._model.chunks), pipeline.params_gathered():
            self.set_output()
            yield pipeline

    def load_weights(self, directory: Path) -> None:
        """Load the weights of a checkpoint into the model and the optimizer's main parameters."""
        load_weights(self._model, directory)
        if self._training is not None:
            self._training.engine.reload_main_params()

    def start(self, schedule_steps: int) -> Training:
        """Build engine and learning rate for a run of ``schedule_steps``; reuse the engine of an earlier run."""
        rate, engine = run_rate(self._args, schedule_steps), self.new_engine()
        self._training = Training(engine, rate)
        return self._training

    def new_engine(self) -> Engine:
        """Return a new engine, or that of an earlier run, whose chunks are wrapped already."""
        if self._training is not None:
            self._training.engine.update_learning_rates(self._args)
            return self._training.engine
        select_trained_parts(self._model, self._args)  # another trainer may have selected other parts
        return Engine(
            list(self._model.chunks),
            self._args,
            self._loss,
            wants_logits=self._hf.wants_logits,
            num_items=self._hf.num_items,
        )
