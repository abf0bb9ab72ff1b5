"""Prediction layers that are computed again know which tokens are padding.

megatron-core 0.18 hands the mask to their ``_checkpointed_forward``, which does not take it: every step with prediction
layers and full recomputation ends in a TypeError.
"""

import functools
import inspect
from collections.abc import Callable

from torch import Tensor

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_checkpointed_forward"


class _WithMask:
    """A prediction layer whose transformer layer is told of the padding, also when it is computed again."""

    def __init__(self, layer: Upstream, mask: Tensor | None) -> None:
        self._layer, self._mask = layer, mask

    def __getattr__(self, name: str) -> Upstream:
        return getattr(self._layer, name)

    def _proj_and_transformer_layer(self, **given: object) -> Tensor:
        computed: Tensor = self._layer._proj_and_transformer_layer(**given, padding_mask=self._mask)
        return computed


def with_mask(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``_checkpointed_forward`` that takes a ``padding_mask``."""

    @functools.wraps(forward)
    def masked(layer: Upstream, *args: object, padding_mask: Tensor | None = None, **given: object) -> Tensor:
        return forward(_WithMask(layer, padding_mask), *args, **given)

    return masked


def _needed() -> bool:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    forward = getattr(MultiTokenPredictionLayer, _NAME)
    taken = inspect.signature(forward, follow_wrapped=False).parameters
    return "decoder_input" in taken and "padding_mask" not in taken


def _apply() -> None:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    setattr(MultiTokenPredictionLayer, _NAME, with_mask(getattr(MultiTokenPredictionLayer, _NAME)))


PATCH = Patch(
    name="prediction-mask",
    why="prediction layers that are computed again raise TypeError for padding_mask",
    megatron=">=0.18,<0.19",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
