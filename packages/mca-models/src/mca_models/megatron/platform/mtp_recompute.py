"""Recompute MTP layers with packed sequences, and keep their gradients with fp8.

Before 0.18 megatron-core passes all arguments of an MTP layer to the checkpoint function. That of ``tensor_parallel``
saves tensors only: packed sequences end in ``TypeError: save_for_backward can only save variables``. Transformer
Engine's, which fp8 uses, takes them by name, where autograd does not see them: the layer gets no gradients. Here
tensors are positional, and everything else is in a closure.
"""

import functools
from collections.abc import Callable

from torch import Tensor

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_checkpointed_forward"


def with_tensors_by_position(checkpointed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return Megatron's ``_checkpointed_forward`` with a ``run`` that takes tensors only."""

    @functools.wraps(checkpointed)
    def split(layer: Upstream, run: Callable[..., Tensor], **kwargs: object) -> Tensor:
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in kwargs.items() if name not in tensors}

        def closed(*values: Tensor) -> Tensor:
            return run(**dict(zip(tensors, values, strict=True)), **rest)

        return checkpointed(layer, closed, *tensors.values())

    return split


def _layer() -> Upstream:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return MultiTokenPredictionLayer


def _needed() -> bool:
    forward = getattr(_layer(), _NAME)
    return "forward_func" in forward.__code__.co_varnames and not hasattr(forward, "__wrapped__")


def _apply() -> None:
    setattr(_layer(), _NAME, with_tensors_by_position(getattr(_layer(), _NAME)))


PATCH = Patch(
    name="mtp-recompute",
    why="recomputed MTP layers raise TypeError for packed sequences, and get no gradients with fp8",
    megatron=">=0.16.1,<0.18",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
