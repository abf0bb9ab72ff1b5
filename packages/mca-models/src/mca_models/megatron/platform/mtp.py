"""Patches of multi-token prediction."""

import copy
import functools
import inspect
from collections.abc import Callable

from torch import Tensor

from mca_models.megatron.layers.attention import ON_HOST
from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import PackedSeqParams, Upstream

_FORWARD = "_checkpointed_forward"


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


def _mtp_layer() -> Upstream:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return MultiTokenPredictionLayer


def _mtp_recompute_needed() -> bool:
    forward = getattr(_mtp_layer(), _FORWARD)
    return "forward_func" in forward.__code__.co_varnames and not hasattr(forward, "__wrapped__")


def _apply_mtp_recompute() -> None:
    setattr(_mtp_layer(), _FORWARD, with_tensors_by_position(getattr(_mtp_layer(), _FORWARD)))


MTP_RECOMPUTE = Patch(
    name="mtp-recompute",
    why="recomputed MTP layers raise TypeError for packed sequences, and get no gradients with fp8",
    megatron=">=0.16.1,<0.18",
    devices=EVERYWHERE,
    needed=_mtp_recompute_needed,
    apply=_apply_mtp_recompute,
)
"""Recompute MTP layers with packed sequences, and keep their gradients with fp8.

Before 0.18 megatron-core passes all arguments of an MTP layer to the checkpoint function. That of ``tensor_parallel``
saves tensors only: packed sequences end in ``TypeError: save_for_backward can only save variables``. Transformer
Engine's, which fp8 uses, takes them by name, where autograd does not see them: the layer gets no gradients. Here
tensors are positional, and everything else is in a closure.
"""


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


def _mtp_padding_mask_needed() -> bool:
    forward = getattr(_mtp_layer(), _FORWARD)
    parameters = inspect.signature(forward, follow_wrapped=False).parameters
    return "decoder_input" in parameters and "padding_mask" not in parameters


def _apply_mtp_padding_mask() -> None:
    setattr(_mtp_layer(), _FORWARD, with_mask(getattr(_mtp_layer(), _FORWARD)))


MTP_PADDING_MASK = Patch(
    name="mtp-padding-mask",
    why="recomputed MTP layers raise TypeError for padding_mask",
    megatron=">=0.18,<0.19",
    devices=EVERYWHERE,
    needed=_mtp_padding_mask_needed,
    apply=_apply_mtp_padding_mask,
)
"""Pass the padding mask to recomputed MTP layers.

megatron-core 0.18 passes the mask to their ``_checkpointed_forward``, which does not take it: every step with MTP
layers and full recomputation ends in a TypeError.
"""


_ROLL = "_roll_tensor_packed_seq"


def _packed_roll_needed() -> bool:
    from megatron.core.transformer import multi_token_prediction

    plain = getattr(multi_token_prediction, _ROLL)
    return "cu_seqlens[i + 1]" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply_packed_roll() -> None:
    from megatron.core.transformer import multi_token_prediction

    plain = getattr(multi_token_prediction, _ROLL)

    @functools.wraps(plain)
    def without_waiting(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: PackedSeqParams, *args: Upstream
    ) -> tuple[Tensor, Tensor]:
        params = copy.copy(packed_seq_params)
        params.cu_seqlens_q = getattr(params.cu_seqlens_q, ON_HOST, params.cu_seqlens_q)
        moved: tuple[Tensor, Tensor] = plain(tensor, shifts, dims, params, *args)
        return moved

    setattr(multi_token_prediction, _ROLL, without_waiting)


PACKED_ROLL = Patch(
    name="packed-roll",
    why="MTP layers synchronise with the GPU at the boundaries of each packed sequence",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_packed_roll_needed,
    apply=_apply_packed_roll,
)
"""Shift the inputs of MTP layers in packed rows by boundaries in host memory.

Megatron's ``_roll_tensor_packed_seq`` splits rows at entries of ``cu_seqlens``. If that is on the GPU, the host
synchronises four times for each sequence, whenever tokens, positions, labels or masks are shifted. The code that packed
the rows has the same tensor in host memory (`set_packed_lengths`), which Megatron gets instead.
"""
