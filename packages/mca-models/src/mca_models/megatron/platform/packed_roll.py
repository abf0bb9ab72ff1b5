"""What prediction layers take one token ahead in packed rows is cut where the host knows that sequences end.

Megatron's ``_roll_tensor_packed_seq`` cuts rows at entries of ``cu_seqlens``. If that is on the GPU, the host waits for
all that was launched four times for each sequence, whenever tokens, positions, labels or masks are moved on. Whoever
packed the rows has the same tensor in host memory (`set_packed_lengths`): it is given to Megatron instead.
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
        known = copy.copy(packed_seq_params)
        known.cu_seqlens_q = getattr(known.cu_seqlens_q, ON_HOST, known.cu_seqlens_q)
        moved: tuple[Tensor, Tensor] = plain(tensor, shifts, dims, known, *args)
        return moved

    setattr(multi_token_prediction, _NAME, without_waiting)


PATCH = Patch(
    name="packed-roll",
    why="prediction layers wait for the GPU at the ends of each packed sequence, to read what the host knows",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
