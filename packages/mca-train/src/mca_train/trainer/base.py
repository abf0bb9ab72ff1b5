"""Attributes of `McaTrainer`, declared once with their types for all mixins.

`McaTrainer` sets them in its constructor, and `Training` when ``train`` starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_train.batching.collate import Collator, CollatorFormat
from mca_train.batching.loaders import Loaders
from mca_train.batching.position import RunPosition
from mca_train.checkpoint.loop_state import PendingEvents, Totals
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import Engine
from mca_train.engine.pipeline import Pipeline
from mca_train.groups import Ranks
from mca_train.lr_schedule import LearningRate
from mca_train.metrics.meter import LossMeter
from mca_train.metrics.metric_accumulator import AuxLossMeter, Extreme, MetricAccumulator
from mca_train.metrics.source_losses import SourceLosses
from mca_train.trainer.monitor import Watch

if TYPE_CHECKING:
    from mca_models import VirtualModels


class TrainerOptions(TypedDict):
    """Constructor arguments of every trainer; `McaTrainer` documents them."""

    model: "VirtualModels"
    args: TrainingArguments
    data_collator: NotRequired[Collator | None]
    train_dataset: NotRequired[Samples | None]
    eval_dataset: NotRequired[Samples | dict[str, Samples] | None]
    processing_class: NotRequired[PreTrainedTokenizerBase | None]
    callbacks: NotRequired[Sequence[TrainerCallback] | None]
    collator_format: NotRequired[CollatorFormat | None]
    pack_length: NotRequired[int | None]


@dataclass(frozen=True)
class Training:
    """Engine and learning rate, available once ``train`` has started."""

    engine: Engine
    rate: LearningRate


class TrainerBase(Trainer):  # type: ignore[misc]
    """Attributes that all mixins of `McaTrainer` share.

    Attributes:
        args: The training arguments.
        model: This rank's part of the model.
        train_dataset: Training samples.
        eval_dataset: Evaluation samples, or several datasets by name.
        processing_class: The tokenizer.
        state: Steps, epochs and logs, as Hugging Face's callbacks see them.
        control: Requests of the callbacks.
        callback_handler: Calls the callbacks.
        ranks: This rank.
        metrics: Accumulator for the custom metrics of `compute_loss`.
        metric_names: Names of the custom metrics.
        metric_differences: Logged differences of two custom metrics.
        metric_extremes: Logged smallest or largest values.
        run_kind: Kind of run in its checkpoints; it resumes only from the same kind.
        watch: Monitor of the run.
        started_at_step: Steps done before `train`.
        output_lock: Lock of ``output_dir`` if the caller has taken it; else `train` takes it.
    """

    args: TrainingArguments
    model: "VirtualModels"
    train_dataset: Samples | None
    eval_dataset: Samples | dict[str, Samples] | None
    processing_class: PreTrainedTokenizerBase | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    ranks: Ranks
    metrics: MetricAccumulator
    watch: Watch
    started_at_step: int
    output_lock: OutputLock | None = None
    metric_names: tuple[str, ...]
    metric_differences: Mapping[str, tuple[str, str]]
    metric_extremes: Mapping[str, Extreme]
    run_kind: str = "pretrain or sft"
    _is_token_loss: bool
    """True if the loss is the mean over target tokens, False if `compute_loss` is overridden."""
    _training: Training
    _pipeline: Pipeline
    """Runs the model forward; once ``train`` has started it is the engine."""
    _position: RunPosition
    _loaders: Loaders
    _checkpoints: CheckpointWriter
    _meter: LossMeter
    _aux_losses: AuxLossMeter
    _sources: SourceLosses | None
    """Losses of a mixture's sources while training on it."""
    _totals: Totals
    _pending: PendingEvents
    _claimed: Path | None = None
    """The ``output_dir`` whose checkpoints all belong to this trainer's runs."""
    _replaces: bool = False
    """True if this run started over: its first complete checkpoint replaces those in ``output_dir``."""
    _can_put_off: bool = False
    """True if SIGTERM may end the running evaluation, which is repeated on resume."""
    _samples: int
    """Samples that this process has trained on; a pack counts all its samples."""

    @property
    def engine(self) -> Engine:
        """Return the engine with Megatron's training step.

        Raises:
            McaError: `train` has not started yet.
        """
        if not isinstance(self._pipeline, Engine):
            raise McaError(
                "trainer.engine exists once train() has started; before that, the weights are the model's own and "
                "need no params_gathered() or reload_main_params()"
            )
        return self._pipeline
