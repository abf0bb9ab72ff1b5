"""The attributes of the trainer are declared here, once and with their types, for all files that its methods are in.

Nothing is computed or set here. `McaTrainer` sets the attributes when it is made, and `Training` when ``train`` begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_train.batching.collate import Collator
from mca_train.batching.collator_output import CollatorFormat
from mca_train.batching.loaders import Loaders
from mca_train.batching.position import RunPosition
from mca_train.checkpoint.carried import Due, Totals
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import Engine
from mca_train.engine.pipeline import Pipeline
from mca_train.groups import Ranks
from mca_train.lr_schedule import LearningRate
from mca_train.metrics.meter import LossMeter
from mca_train.metrics.signals import Extreme, ModelLosses, Signals
from mca_train.metrics.source_losses import SourceLosses
from mca_train.trainer.monitor import Watch

if TYPE_CHECKING:
    from mca_models import VirtualModels


class TrainerOptions(TypedDict):
    """What every trainer takes; `McaTrainer` says what it is."""

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
    """What steps are made with: there from the beginning of ``train`` on."""

    engine: Engine
    rate: LearningRate


class TrainerParts(Trainer):  # type: ignore[misc]
    """What every part of `McaTrainer` may look at and change.

    Attributes:
        args: The training arguments.
        model: The model, of which this rank holds a part.
        train_dataset: What is trained on.
        eval_dataset: What is evaluated on, or several by name.
        processing_class: The tokenizer.
        state: Steps, epochs and logs, as Hugging Face's callbacks see them.
        control: What the callbacks ask for.
        callback_handler: Calls them.
        ranks: This rank among the others.
        signals: What `compute_loss` adds to, beside its loss.
        signal_names: The names of what it adds.
        signal_differences: What is reported beside their means.
        signal_extremes: The smallest or largest numbers that are told beside them.
        run_kind: Which kind of run its checkpoints are of; it goes on from no others that say so.
        watch: What is looked after beside the steps.
        started_at_step: Steps that were done before `train`.
        output_lock: Of ``output_dir``, if whoever made the trainer has taken it; else `train` does.
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
    signals: Signals
    watch: Watch
    started_at_step: int
    output_lock: OutputLock | None = None
    signal_names: tuple[str, ...]
    signal_differences: Mapping[str, tuple[str, str]]
    signal_extremes: Mapping[str, Extreme]
    run_kind: str = "pretrain or sft"
    _is_token_loss: bool
    """The loss is the mean over target tokens, not that of an overridden `compute_loss`."""
    _training: Training
    _pipeline: Pipeline
    """Runs the model forward; from the beginning of ``train`` on it is the engine."""
    _place: RunPosition
    _loaders: Loaders
    _checkpoints: CheckpointWriter
    _meter: LossMeter
    _model_losses: ModelLosses
    _sources: SourceLosses | None
    """Of a mixture, while it is trained on."""
    _totals: Totals
    _due: Due
    _claimed: Path | None = None
    """The ``output_dir`` whose checkpoints are all of this trainer's runs."""
    _replaces: bool = False
    """This run began anew; those that stand there go when its first own is complete."""
    _can_put_off: bool = False
    """SIGTERM ends the evaluation that is running, which is made when the run continues."""
    _samples: int
    """That this process has trained on; packs count as what is in them."""

    @property
    def engine(self) -> Engine:
        """Megatron's training step.

        Raises:
            McaError: `train` has not begun yet.
        """
        if not isinstance(self._pipeline, Engine):
            raise McaError(
                "trainer.engine is there from the beginning of train() on; before, the weights are the model's own and "
                "need no at_rest() or take_weights()"
            )
        return self._pipeline
