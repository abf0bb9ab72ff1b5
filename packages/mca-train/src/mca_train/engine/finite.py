"""Gradients and parameters that are no numbers: which one, on which rank."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import all_gather

_SHOWN = 3
_FOUND = "in local grad norm"


def require_finite(
    loss: float | None, grad_norm: float | None, step: int, trained: Iterable[tuple[str, Tensor]]
) -> None:
    """Raises the same error on every rank if the step's loss or gradient norm is not finite.

    Args:
        loss: None where it is not known yet.
        grad_norm: None if nothing is clipped; all ranks have the same.
        step: The step's number.
        trained: This rank's parameters that are trained, by name; their gradients are still there.

    Raises:
        McaError: Names the first parameters (in model order) whose gradients are not finite.
    """
    if all(value is None or math.isfinite(value) for value in (loss, grad_norm)):
        return
    named = _named((name, _gradient(tensor)) for name, tensor in trained)
    what = (
        f"the loss is {loss}"
        if loss is not None and not math.isfinite(loss)
        else f"the gradient norm is {grad_norm}"
    )
    where = f"; gradients that are not finite: {named}" if named else ""
    raise McaError(
        f"step {step}: {what}{where}. Resume from the last checkpoint with a lower learning_rate, or look at the "
        "samples of this step"
    )


@contextmanager
def telling_nan() -> Iterator[None]:
    """A block in which Megatron looks at gradients (``check_for_nan_in_grad``): what it finds is reported in one line.

    Raises:
        McaError: A gradient of this rank is not finite.
    """
    try:
        yield
    except RuntimeError as error:
        if _FOUND not in str(error):
            raise
        where = str(error).partition("message='")[2].partition("'")[0] or _FOUND
        raise McaError(
            f"check_for_nan_in_grad: {where}. Resume from the last checkpoint with a lower learning_rate, or look at "
            "the samples of this step"
        ) from error


def require_finite_weights(step: int, trained: Iterable[tuple[str, Tensor]]) -> None:
    """Raises the same error on every rank if a parameter that is trained is not finite.

    Args:
        step: Steps that were made.
        trained: This rank's parameters that are trained, by name.

    Raises:
        McaError: Names the first of them (in model order).
    """
    named = _named(trained)
    if named:
        raise McaError(
            f"step {step}: the model is broken and is not saved; parameters that are not finite: {named}. "
            "Resume from the last checkpoint with a lower learning_rate"
        )


def _named(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """The first of all ranks' tensors that are not finite; empty if all are. Collective."""
    mine = [(name, kind) for name, tensor in tensors if (kind := _kind(tensor))]
    rank_of: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(all_gather(mine)):
        for name, kind in found:
            rank_of.setdefault(name, (rank, kind))
    named = [f"{name} (rank {rank}: {kind})" for name, (rank, kind) in list(rank_of.items())[:_SHOWN]]
    return ", ".join(named) + (f" and {len(rank_of) - _SHOWN} more" if len(rank_of) > _SHOWN else "")


def _gradient(tensor: Tensor) -> Tensor | None:
    gradient: Tensor | None = getattr(tensor, "main_grad", None)
    return tensor.grad if gradient is None else gradient


def _kind(tensor: Tensor | None) -> str | None:
    if tensor is None or bool(torch.isfinite(tensor).all()):
        return None
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"
