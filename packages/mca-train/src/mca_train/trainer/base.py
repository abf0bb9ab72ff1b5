"""`HfTrainer`: Hugging Face's Trainer without accelerate, base of `McaTrainer` and lifecycle of its parts.

`Hooks` are the methods of a trainer that its parts call, and `Progress` is the state that they share.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Never, NotRequired, Protocol, TypedDict

import torch
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler, ExportableState

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_config.types import JsonObject
from mca_train.batching.collate import Collator, CollatorFormat
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.position import RunLength, RunPosition
from mca_train.checkpoint.loop_state import PendingEvents, Totals
from mca_train.data.token_dataset import Samples
from mca_train.engine.engine import StepResult
from mca_train.groups import Ranks
from mca_train.metrics.metric_accumulator import Extreme
from mca_train.metrics.step_lines import StepLines
from mca_train.metrics.step_profile import StepProfile
from mca_train.trainer.hf_shims import ModelView, NoAccelerator
from mca_train.types import MegatronOptimizer, Scheduler

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.log_probs.vocabulary import TokenValues


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


class Hooks(Protocol):
    """Attributes and methods of a trainer that its parts use; `McaTrainer` documents them, subclasses override them."""

    metric_names: tuple[str, ...]
    metric_differences: Mapping[str, tuple[str, str]]
    metric_extremes: Mapping[str, Extreme]
    wants_logits: bool
    token_values: "TokenValues | None"
    run_kind: str

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss sum of one micro-batch and its count."""

    def num_items(self, batch: MicroBatch) -> Tensor:
        """Return the count that `compute_loss` returns."""

    def before_forward(self, batch: StepBatch) -> None:
        """Run before each step's forward pass."""

    def training_step(self, batch: StepBatch) -> StepResult:
        """Run one optimizer step."""


@dataclass(kw_only=True)
class Progress:
    """Progress of a run in addition to Hugging Face's `TrainerState`; the trainer's parts share one."""

    started_at_step: int = 0
    """Steps done before `train`."""
    position: RunPosition = field(default_factory=RunPosition)
    totals: Totals = field(default_factory=Totals)
    pending: PendingEvents = field(default_factory=PendingEvents)
    samples: int = 0
    """Samples that this process has trained on; a pack counts all its samples."""


class HfTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer on Megatron's process groups instead of accelerate.

    Args:
        ranks: This rank.
        view: Model that callbacks see.
        args: The training arguments.
        data_collator: Builds micro-batches.
        train_dataset: Training samples.
        eval_dataset: Evaluation samples, or several datasets by name.
        processing_class: The tokenizer.
        callbacks: Callbacks in addition to Hugging Face's.

    Attributes:
        state: Steps, epochs and logs, as callbacks see them.
        control: Requests of the callbacks.
        callback_handler: Calls the callbacks.
    """

    args: TrainingArguments
    train_dataset: Samples | None
    eval_dataset: Samples | dict[str, Samples] | None
    processing_class: PreTrainedTokenizerBase | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler

    def __init__(
        self,
        ranks: Ranks,
        view: ModelView,
        *,
        args: TrainingArguments,
        data_collator: Collator,
        train_dataset: Samples | None,
        eval_dataset: Samples | dict[str, Samples] | None,
        processing_class: PreTrainedTokenizerBase | None,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        self.ranks = ranks
        self._view = view
        self._own_optimizer: tuple[MegatronOptimizer, Scheduler] = (None, None)
        super().__init__(
            model=view,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self._print_lines()

    def _print_lines(self) -> None:
        """Replace the dictionaries of Hugging Face's callbacks by readable lines; add the profiler."""
        callbacks = self.callback_handler.callbacks  # Hugging Face's own is last, after the user's
        if type(callbacks[-1]) in (ProgressCallback, PrinterCallback):
            callbacks.pop()
            self.add_callback(StepLines(bar=not self.args.disable_tqdm and sys.stderr.isatty()))
        if self.args.profile:
            self.add_callback(StepProfile(self.ranks.rank))

    def fire(self, event: str, *values: object, state: TrainerState | None = None) -> None:
        """Call the callbacks' method ``event``, which may change `control`; ``state`` is the trainer's by default."""
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, state or self.state, self.control, *values)

    def set_optimizer(self, optimizer: MegatronOptimizer, scheduler: Scheduler) -> None:
        """Show the optimizer and the schedule to callbacks, and the schedule to Hugging Face's evaluation."""
        self.optimizer, self.lr_scheduler = self._own_optimizer = optimizer, scheduler
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self._view, optimizer, scheduler

    def has_other_optimizer(self) -> bool:
        """Return True if ``optimizer`` or ``lr_scheduler`` is set, to another than by `set_optimizer`."""
        current = self.optimizer, self.lr_scheduler
        pairs = zip(current, self._own_optimizer, strict=True)
        return any(now is not None and now is not own for now, own in pairs)

    def create_optimizer(self, model: object = None) -> Never:
        """Raise an error: the optimizer is Megatron's."""
        raise McaError(
            "McaTrainer.create_optimizer is not supported; the optimizer is Megatron's: set optimizer and its keys "
            "in the arguments"
        )

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> Never:
        """Raise an error, as `create_optimizer`."""
        self.create_optimizer()

    def set_length(self, length: RunLength) -> None:
        """Set the steps and epochs of the run in `state`."""
        self.state.compute_steps(self.args, length.max_steps)
        self.state.max_steps = length.max_steps
        self.state.num_train_epochs = length.num_epochs

    def exportable(self) -> list[TrainerCallback | TrainerControl]:
        """Return the callbacks and the control that have a state for checkpoints."""
        return [
            cb for cb in [*self.callback_handler.callbacks, self.control] if isinstance(cb, ExportableState)
        ]

    def callback_states(self) -> JsonObject:
        """Return the states of the callbacks by the names of their classes."""
        states: dict[str, list[JsonObject]] = {}
        for callback in self.exportable():
            states.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: values[0] if len(values) == 1 else values for name, values in states.items()}

    def create_accelerator_and_postprocess(self) -> None:
        """Set `NoAccelerator`: Megatron owns process groups, placement and data parallelism."""
        self.accelerator = NoAccelerator()
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.gather_function = None

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: the factory has placed the model."""

    def is_world_process_zero(self) -> bool:
        """Return True on rank 0."""
        return self.ranks.is_first

    def is_local_process_zero(self) -> bool:
        """Return True on the first rank of a machine."""
        return self.ranks.is_first or int(self.args.local_process_index) == 0

    def predict(
        self, test_dataset: object, ignore_keys: object = None, metric_key_prefix: str = "test"
    ) -> Never:
        """Raise an error: logits are split over ranks."""
        raise McaError(
            "McaTrainer.predict is not supported; use evaluate for a loss, VirtualModels.logits for logits"
        )

    def hyperparameter_search(self, *_: object, **__: object) -> Never:
        """Raise an error."""
        raise McaError("hyper-parameter search is not supported")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples in a step over all ranks."""
        return int(
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * self.ranks.data_parallel_size
        )
