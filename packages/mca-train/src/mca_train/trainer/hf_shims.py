"""Replacements of the parts of Hugging Face's ``Trainer`` and callbacks that Megatron takes over."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Never, TypeVar

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_config.types import JsonObject, Typed, Values

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
