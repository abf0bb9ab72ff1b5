"""Pass the padding mask to recomputed MTP layers.

megatron-core 0.18 passes the mask to their ``_checkpointed_forward``, which does not take it: every step with MTP
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
    """MTP layer whose transformer layer gets the padding mask, also in recomputation."""

    def __init__(self, layer: Upstream, mask: Tensor | None) -> None:
        self._layer, self._mask = layer, mask

    def __getattr__(self, name: str) -> Upstream:
        return getattr(self._layer, name)

    def _proj_and_transformer_layer(self, **kwargs: object) -> Tensor:
        computed: Tensor = self._layer._proj_and_transformer_layer(**kwargs, padding_mask=self._mask)
        return computed


def with_mask(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``_checkpointed_forward`` with a ``padding_mask`` argument."""

    @functools.wraps(forward)
    def masked(
        layer: Upstream, *args: object, padding_mask: Tensor | None = None, **kwargs: object
    ) -> Tensor:
        return forward(_WithMask(layer, padding_mask), *args, **kwargs)

    return masked


def _needed() -> bool:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    forward = getattr(MultiTokenPredictionLayer, _NAME)
    parameters = inspect.signature(forward, follow_wrapped=False).parameters
    return "decoder_input" in parameters and "padding_mask" not in parameters


def _apply() -> None:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    setattr(MultiTokenPredictionLayer, _NAME, with_mask(getattr(MultiTokenPredictionLayer, _NAME)))


PATCH = Patch(
    name="mtp-padding-mask",
    why="recomputed MTP layers raise TypeError for padding_mask",
    megatron=">=0.18,<0.19",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
