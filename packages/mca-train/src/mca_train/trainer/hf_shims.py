"""Hugging Face's ``Trainer`` and its callbacks see these objects in place of the parts that Megatron replaces.

Nothing here trains, evaluates or saves.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Never, TypeVar

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from mca_config.arguments import float16_problems
from mca_config.errors import McaError, raise_problems
from mca_config.training import TrainingArguments
from mca_config.types import JsonObject, Typed, Values
from mca_train.trainer.base import TrainerParts
from mca_train.trainer.model_arguments import require_made_with
from mca_train.types import VirtualModels

T = TypeVar("T")


def require_mca(model: VirtualModels, args: TrainingArguments) -> None:
    """Refuses what Hugging Face's Trainer takes in the place of ours, and a model that was made otherwise.

    Raises:
        McaError: The model is not one of Megatron's, or is what an adapter was put on; or the arguments lack
            Megatron's, or ask for another model.
    """
    if not hasattr(model, "chunks"):
        raise McaError(
            f"model is a {type(model).__name__}; expected what mca_models.AutoModel.from_pretrained returns"
        )
    model.reject_hidden_adapter()
    if not hasattr(args, "layout"):
        raise McaError(
            f"args is a {type(args).__module__}.{type(args).__name__}; expected mca_config.TrainingArguments"
        )
    require_made_with(model, args)


def require_optimizable(model: VirtualModels, args: TrainingArguments) -> None:
    """Refuses what optimizers cannot do with weights in float16, which the model's files may have.

    Raises:
        McaError: Something of it is asked for.
    """
    raise_problems(float16_problems(args) if model.config.dtype == "float16" else [], "McaTrainer")


def require_unmerged(model: VirtualModels) -> None:
    """Refuses to train an adapter that is folded into the weights, or put on the model since: nothing comes to it.

    Raises:
        McaError: It is.
    """
    from mca_models.megatron.peft import PeftModels

    model.reject_hidden_adapter()
    if isinstance(model, PeftModels) and model.merged:
        raise McaError("the adapter is merged, so nothing would be trained; call unmerge_adapter first")


def require_vocabulary(model: VirtualModels, args: TrainingArguments, *, wants_logits: bool) -> None:
    """Refuses a model that scores sequences or tokens where the loss is a cross entropy of tokens, and the reverse.

    Raises:
        McaError: It is one, or an argument is about such a cross entropy where there is none.
    """
    if wants_logits and args.label_smoothing_factor:
        raise McaError("label_smoothing_factor does nothing for a trainer that wants logits; remove it")
    if model.config.num_labels is not None and not wants_logits:
        raise McaError(
            f"the model has a head for {model.config.head}, not the vocabulary's; train it with RewardTrainer, "
            "ClassificationTrainer or a trainer of your own that sets wants_logits"
        )


@contextmanager
def telling_metric(args: TrainingArguments) -> Iterator[None]:
    """A block in which Hugging Face looks up ``metric_for_best_model``: that there is none is reported in one line.

    Raises:
        McaError: The evaluation has found no such number.
    """
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise McaError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, of which the evaluation has no number: there is "
            "no such metric, or no sample of the evaluation dataset counts for it; name another one"
        ) from error


class NoAccelerator:
    """Stands where the Trainer keeps accelerate's ``Accelerator``: it wraps nothing and moves nothing."""

    def unwrap_model(self, model: T, **_: object) -> T:
        """The model itself."""
        return model

    def free_memory(self, *objects: object) -> tuple[object, ...]:
        """Nothing was taken."""
        return objects


class WithoutAccelerator(TrainerParts):
    """The Trainer's methods about devices and processes, answered by Megatron's groups instead of accelerate."""

    def create_accelerator_and_postprocess(self) -> None:
        """No accelerate: Megatron owns process groups, placement and data parallelism."""
        self.accelerator = NoAccelerator()
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.gather_function = None

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """The factory has placed it."""

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_first

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.ranks.is_first or int(self.args.local_process_index) == 0

    def predict(self, *_: object, **__: object) -> Never:
        """Refused: logits are spread over ranks."""
        raise McaError(
            "McaTrainer.predict is not supported; use evaluate for a loss, VirtualModels.logits for logits"
        )

    def hyperparameter_search(self, *_: object, **__: object) -> Never:
        """Refused."""
        raise McaError("hyper-parameter search is not supported")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples in a step, all ranks together."""
        return int(
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * self.ranks.data_parallel_size
        )


class ConfigView:
    """A model's Hugging Face configuration, for callbacks that log it."""

    def __init__(self, hf_config: Values) -> None:
        self._values = dict(hf_config)

    def to_dict(self) -> JsonObject:
        """All fields."""
        return dict(self._values)

    def to_json_string(self, *_: object, **__: object) -> str:
        """All fields, as the ``config.json`` has them."""
        return json.dumps(self._values, indent=2, sort_keys=True, default=str) + "\n"

    def __getattr__(self, name: str) -> Typed:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values.get(name)


class ModelView(torch.nn.Module):
    """The model as the Trainer's constructor and the callbacks look at it: a module with a configuration."""

    accepts_loss_kwargs = True

    def __init__(self, hf_config: Values) -> None:
        super().__init__()
        self.config = ConfigView(hf_config)

    def named_parameters(self, *_: object, **__: object) -> Never:
        """Refused: a callback would see no weights."""
        raise McaError(
            "a callback asks its model for parameters, which are spread over ranks; give the callback the trainer, and "
            "take trainer.model"
        )

    def state_dict(self, *_: object, **__: object) -> Never:
        """Refused, as `named_parameters`."""
        self.named_parameters()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
        """Never called: the engine runs Megatron's schedule over the chunks."""
        raise NotImplementedError("McaTrainer trains through Megatron's schedule; use VirtualModels.logits")


def restore_counters(callbacks: Iterable[TrainerCallback], saved: Values) -> None:
    """Lets callbacks that count (early stopping) go on where those of the same class stood in a checkpoint.

    Their arguments stay those of this run; ``restore_callback_states_from_checkpoint`` takes the checkpoint's.
    """
    by_name: dict[str, list[JsonObject]] = {
        name: list(states) if isinstance(states, list) else [states] for name, states in saved.items()
    }
    for callback in callbacks:
        states = by_name.get(type(callback).__name__)
        if states and isinstance(callback, ExportableState):
            vars(callback).update(states.pop(0).get("attributes", {}))


def forget_patience(callbacks: Iterable[TrainerCallback]) -> None:
    """Lets early stopping count from 0: what it has counted is of another metric."""
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = 0


def has_given_up(callbacks: Iterable[TrainerCallback]) -> bool:
    """Whether early stopping had ended the run when the checkpoint was written that it was restored from."""
    return any(
        callback.early_stopping_patience_counter >= max(callback.early_stopping_patience, 1)
        for callback in callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )
