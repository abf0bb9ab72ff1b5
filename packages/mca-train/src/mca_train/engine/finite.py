"""Checks for NaN and inf in gradients and parameters; errors name the tensor and its rank."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import all_gather

_SHOWN = 3
_NAN_ERROR = "in local grad norm"


def require_finite(
    loss: float | None, grad_norm: float | None, step: int, trained: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise the same error on every rank if the step's loss or gradient norm is not finite.

    Args:
        loss: None where it is not known yet.
        grad_norm: None if nothing is clipped; the same on all ranks.
        step: The step's number.
        trained: This rank's trained parameters by name, with their gradients.

    Raises:
        McaError: Names the first parameters (in model order) whose gradients are not finite.
    """
    if all(value is None or math.isfinite(value) for value in (loss, grad_norm)):
        return
    named = _describe_non_finite((name, _gradient(tensor)) for name, tensor in trained)
    what = (
        f"the loss is {loss}"
        if loss is not None and not math.isfinite(loss)
        else f"the gradient norm is {grad_norm}"
    )
    where = f"; gradients that are not finite: {named}" if named else ""
    raise McaError(
        f"step {step}: {what}{where}. Resume from the last checkpoint with a lower learning_rate, or inspect the "
        "samples of this step"
    )


@contextmanager
def name_nan_gradient() -> Iterator[None]:
    """Turn the error of Megatron's ``check_for_nan_in_grad`` into one line.

    Raises:
        McaError: A gradient of this rank is not finite.
    """
    try:
        yield
    except RuntimeError as error:
        if _NAN_ERROR not in str(error):
            raise
        where = str(error).partition("message='")[2].partition("'")[0] or _NAN_ERROR
        raise McaError(
            f"check_for_nan_in_grad: {where}. Resume from the last checkpoint with a lower learning_rate, or inspect "
            "the samples of this step"
        ) from error


def require_finite_weights(step: int, trained: Iterable[tuple[str, Tensor]]) -> None:
    """Raise the same error on every rank if a trained parameter is not finite.

    Args:
        step: Number of steps done.
        trained: This rank's trained parameters by name.

    Raises:
        McaError: Names the first of them (in model order).
    """
    named = _describe_non_finite(trained)
    if named:
        raise McaError(
            f"step {step}: the model has parameters that are not finite and is not saved: {named}. "
            "Resume from the last checkpoint with a lower learning_rate"
        )


def _describe_non_finite(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Describe the first tensors of all ranks that are not finite; empty if all are finite. Collective."""
    local = [(name, kind) for name, tensor in tensors if (kind := _kind(tensor))]
    by_name: dict[str, tuple[int, str]] = {}
    for rank, entries in enumerate(all_gather(local)):
        for name, kind in entries:
            by_name.setdefault(name, (rank, kind))
    shown = [f"{name} (rank {rank}: {kind})" for name, (rank, kind) in list(by_name.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(by_name) - _SHOWN} more" if len(by_name) > _SHOWN else "")


def _gradient(tensor: Tensor) -> Tensor | None:
    gradient: Tensor | None = getattr(tensor, "main_grad", None)
    return tensor.grad if gradient is None else gradient


def _kind(tensor: Tensor | None) -> str | None:
    if tensor is None or bool(torch.isfinite(tensor).all()):
        return None
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"
