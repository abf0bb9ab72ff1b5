"""`HfTrainer`: Hugging Face's Trainer without accelerate, with replacements of what Megatron takes over.

It is the base of `McaTrainer` and the lifecycle of its parts. `Progress` is the state that they share.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Never, NotRequired, TypedDict, TypeVar

import torch
from transformers import (
    EarlyStoppingCallback,
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
from mca_config.types import JsonObject, Typed, Values
from mca_train.batching.collate import Collator, CollatorFormat
from mca_train.batching.position import RunLength, RunPosition
from mca_train.checkpoint.training_state import PendingEvents, Totals
from mca_train.data.token_dataset import Samples
from mca_train.groups import Ranks
from mca_train.metrics.logs import StepLines
from mca_train.metrics.meters import Extreme
from mca_train.metrics.step_profile import StepProfile
from mca_train.trainer.monitor import Watch
from mca_train.types import MegatronOptimizer, SampleSource, Scheduler

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.megatron.log_probs.vocabulary import TokenValues

T = TypeVar("T")


@contextmanager
def name_missing_metric(args: TrainingArguments) -> Iterator[None]:
    """Turn Hugging Face's KeyError for a missing ``metric_for_best_model`` into one line.

    Raises:
        McaError: The evaluation has no such metric.
    """
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise McaError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, which the evaluation does not report: no such "
            "metric, or no sample of the evaluation dataset counts for it; set another one"
        ) from error


class NoAccelerator:
    """Replacement of accelerate's ``Accelerator`` that wraps and moves nothing."""

    def unwrap_model(self, model: T, **_: object) -> T:
        """Return the model itself."""
        return model

    def free_memory(self, *objects: object) -> tuple[object, ...]:
        """Return the objects unchanged."""
        return objects


class ConfigView:
    """A model's Hugging Face configuration, for callbacks that log it."""

    def __init__(self, hf_config: Values) -> None:
        self._values = dict(hf_config)

    def to_dict(self) -> JsonObject:
        """Return all fields."""
        return dict(self._values)

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return all fields as ``config.json`` has them."""
        return json.dumps(self._values, indent=2, sort_keys=True, default=str) + "\n"

    def __getattr__(self, name: str) -> Typed:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values.get(name)


class ModelView(torch.nn.Module):
    """Module with a configuration that the Trainer's constructor and callbacks see as the model."""

    accepts_loss_kwargs = True

    def __init__(self, hf_config: Values) -> None:
        super().__init__()
        self.config = ConfigView(hf_config)

    def named_parameters(self, *_: object, **__: object) -> Never:
        """Raise an error: a callback would see no weights."""
        raise McaError(
            "a callback reads parameters of its model, which are sharded over ranks; pass the trainer to the callback "
            "and use trainer.model"
        )

    def state_dict(self, *_: object, **__: object) -> Never:
        """Raise an error, as `named_parameters`."""
        self.named_parameters()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
        """Raise an error: the engine runs Megatron's schedule over the chunks."""
        raise NotImplementedError("McaTrainer trains through Megatron's schedule; use VirtualModels.logits")


def restore_counters(callbacks: Iterable[TrainerCallback], saved: Values) -> None:
    """Restore the counters of callbacks (early stopping) from those of the same class in a checkpoint.

    Their arguments stay those of this run; ``restore_callback_states_from_checkpoint`` restores the checkpoint's.
    """
    by_name: dict[str, list[JsonObject]] = {
        name: list(states) if isinstance(states, list) else [states] for name, states in saved.items()
    }
    for callback in callbacks:
        states = by_name.get(type(callback).__name__)
        if states and isinstance(callback, ExportableState):
            vars(callback).update(states.pop(0).get("attributes", {}))


def reset_patience(callbacks: Iterable[TrainerCallback]) -> None:
    """Reset early stopping's count, which belongs to another metric."""
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = 0


def is_early_stopped(callbacks: Iterable[TrainerCallback]) -> bool:
    """Return True if early stopping had ended the run when its checkpoint was written."""
    return any(
        callback.early_stopping_patience_counter >= max(callback.early_stopping_patience, 1)
        for callback in callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )


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
        options: Other arguments of ``transformers.Trainer``.

    Attributes:
        state: Steps, epochs and logs, as callbacks see them.
        control: Requests of the callbacks.
        callback_handler: Calls the callbacks.
    """

    args: TrainingArguments
    model: "VirtualModels"
    watch: Watch
    train_dataset: Samples | None
    eval_dataset: Samples | dict[str, Samples] | None
    processing_class: PreTrainedTokenizerBase | None
    metric_names: tuple[str, ...] = ()
    metric_differences: Mapping[str, tuple[str, str]] = MappingProxyType({})
    metric_extremes: Mapping[str, Extreme] = MappingProxyType({})
    wants_logits: bool = False
    token_values: "TokenValues | None" = None
    requires_routed_experts: bool = False
    run_kind: str = "pretrain or sft"
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler

    def __init__(self, ranks: Ranks, view: ModelView, **options: Typed) -> None:
        self.ranks = ranks
        self._view = view
        self._own_optimizer: tuple[MegatronOptimizer, Scheduler] = (None, None)
        super().__init__(model=view, **options)
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

    def replace_datasets(self, replace: Callable[[SampleSource, str], Samples]) -> None:
        """Replace the training dataset (``train``) and those of evaluations (``eval``, ``eval_<name>``) by others."""

        def replaced(dataset: SampleSource, name: str) -> Samples | None:
            return None if dataset is None else replace(dataset, name)

        self.train_dataset = replaced(self.train_dataset, "train")
        if isinstance(self.eval_dataset, dict):
            parts = self.eval_dataset.items()
            self.eval_dataset = {name: replaced(dataset, f"eval_{name}") for name, dataset in parts}
        else:
            self.eval_dataset = replaced(self.eval_dataset, "eval")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples in a step over all ranks."""
        return int(
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * self.ranks.data_parallel_size
        )
