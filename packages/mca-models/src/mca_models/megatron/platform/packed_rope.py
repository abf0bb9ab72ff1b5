"""Read the lengths of packed sequences for RoPE from host memory.

Megatron's ``_apply_rotary_pos_emb_thd`` reads ``cu_seqlens`` as numbers, for queries and keys of every layer, and the
host synchronises each time. The code that packed the rows has the same tensor in host memory (`set_packed_lengths`),
which Megatron gets instead.
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
    why="RoPE of packed rows synchronises with the GPU in every layer to read the lengths",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
