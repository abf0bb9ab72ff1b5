"""Shift the inputs of MTP layers in packed rows by boundaries in host memory.

Megatron's ``_roll_tensor_packed_seq`` splits rows at entries of ``cu_seqlens``. If that is on the GPU, the host
synchronises four times for each sequence, whenever tokens, positions, labels or masks are shifted. The code that packed
the rows has the same tensor in host memory (`set_packed_lengths`), which Megatron gets instead.
"""

import copy
import functools
import inspect

from torch import Tensor

from mca_models.megatron.layers.attention import ON_HOST
from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import PackedSeqParams, Upstream

_NAME = "_roll_tensor_packed_seq"


def _needed() -> bool:
    from megatron.core.transformer import multi_token_prediction

    plain = getattr(multi_token_prediction, _NAME)
    return "cu_seqlens[i + 1]" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply() -> None:
    from megatron.core.transformer import multi_token_prediction

    plain = getattr(multi_token_prediction, _NAME)

    @functools.wraps(plain)
    def without_waiting(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: PackedSeqParams, *args: Upstream
    ) -> tuple[Tensor, Tensor]:
        params = copy.copy(packed_seq_params)
        params.cu_seqlens_q = getattr(params.cu_seqlens_q, ON_HOST, params.cu_seqlens_q)
        moved: tuple[Tensor, Tensor] = plain(tensor, shifts, dims, params, *args)
        return moved

    setattr(multi_token_prediction, _NAME, without_waiting)


PATCH = Patch(
    name="packed-roll",
    why="MTP layers synchronise with the GPU at the boundaries of each packed sequence",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
