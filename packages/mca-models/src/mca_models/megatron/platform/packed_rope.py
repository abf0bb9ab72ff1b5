"""The rotary embedding of packed rows reads the lengths of their sequences back from the GPU.

Megatron's plain ``_apply_rotary_pos_emb_thd`` asks ``cu_seqlens`` for them as numbers, for queries and keys of every
layer, and the host waits each time for all that was launched. Whoever packed the rows has the same tensor in host
memory (`set_packed_lengths`): it is given to Megatron instead, which only makes numbers of it.
"""

import functools
import inspect

from torch import Tensor

from mca_models.megatron.layers.attention import ON_HOST
from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_NAME = "_apply_rotary_pos_emb_thd"


def _needed() -> bool:
    from megatron.core.models.common.embeddings import rope_utils

    plain = getattr(rope_utils, _NAME)
    return ".tolist()" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    plain = getattr(rope_utils, _NAME)

    @functools.wraps(plain)
    def without_waiting(t: Tensor, cu_seqlens: Tensor, *args: object, **kwargs: Upstream) -> Tensor:
        rotated: Tensor = plain(t, getattr(cu_seqlens, ON_HOST, cu_seqlens), *args, **kwargs)
        return rotated

    setattr(rope_utils, _NAME, without_waiting)


PATCH = Patch(
    name="packed-rope",
    why="the rotary embedding of packed rows waits for the GPU in every layer, to read what the host knows",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
