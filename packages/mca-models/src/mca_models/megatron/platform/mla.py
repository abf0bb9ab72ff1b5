"""Patches of multi-latent attention and of RoPE."""

import functools
import inspect

from torch import Tensor

from mca_models.megatron.layers.attention import ON_HOST
from mca_models.megatron.layers.sharded import ReplicatedLinear
from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _mla_flags_needed() -> bool:
    import megatron.core.transformer.multi_latent_attention as mla

    return bool(mla.HAVE_TE) and not isinstance(mla.TELinear, type)


def _apply_mla_flags() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.HAVE_TE = False


MLA_FLAGS = Patch(
    name="mla-flags",
    why="MLA calls isinstance() with a mock instead of Transformer Engine's class",
    megatron="<0.17",
    devices=EVERYWHERE,
    needed=_mla_flags_needed,
    apply=_apply_mla_flags,
)
"""Tell MLA that Transformer Engine is missing.

megatron-core 0.16.1 sets ``HAVE_TE = True`` in ``multi_latent_attention`` even if Transformer Engine is not installed
(the import succeeds with mock classes), and ``isinstance(x, MagicMock())`` raises TypeError.
"""


def _mla_down_projection_needed() -> bool:
    import megatron.core.transformer.multi_latent_attention as mla

    lists_classes = "Unsupported linear_q_down_proj" in inspect.getsource(mla.MLASelfAttention.__init__)
    return lists_classes and mla.Linear is not ReplicatedLinear


def _apply_mla_down_projection() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.Linear = ReplicatedLinear


MLA_DOWN_PROJECTION = Patch(
    name="mla-down-projection",
    why="MLA builds its down-projections only from listed classes, and the local one has wrong gradients",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_mla_down_projection_needed,
    apply=_apply_mla_down_projection,
)
"""Accept mca's replicated down-projection in MLA.

``MLASelfAttention`` builds its down-projections only from a fixed list of classes. ``ReplicatedLinear`` replaces one
entry of that list, the quantisation tool's ``Linear``, which is never built here. The local spec shards the
down-projection by columns and gathers, whose backward never sums the gradient of the rotary key that all heads share
over tensor ranks.
"""


def _embedding() -> Upstream:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return YarnRotaryEmbedding


def _yarn_cache_needed() -> bool:
    cached = _embedding().get_cached_cos_sin
    by_longest = "seq_len > self.max_seq_len_cached" in inspect.getsource(cached)
    return by_longest and not hasattr(cached, "__wrapped__")


def _apply_yarn_cache() -> None:
    embedding = _embedding()
    cached = embedding.get_cached_cos_sin

    @functools.wraps(cached)
    def with_current_length(self: Upstream, seq_len: int, *args: object, **kwargs: object) -> Upstream:
        is_cut = self.cp_group is not None and self.cp_group.size() > 1 and not self.packed_seq_cached
        if is_cut and seq_len != self.max_seq_len_cached:
            self.max_seq_len_cached = 0
        return cached(self, seq_len, *args, **kwargs)

    embedding.get_cached_cos_sin = with_current_length


YARN_CACHE = Patch(
    name="yarn-cache",
    why="fused RoPE of MLA uses positions of longer rows under context parallelism",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_yarn_cache_needed,
    apply=_apply_yarn_cache,
)
"""Reset the cached table of fused RoPE in MLA if the row length changes under context parallelism.

``YarnRotaryEmbedding.get_cached_cos_sin`` keeps the table of the longest rows so far, for rows that are not packed
already sharded to the two chunks of this context rank. A prefix of it is not the chunks of shorter rows: every layer
would use positions of the longer ones.
"""


_ROTATE = "_apply_rotary_pos_emb_thd"


def _packed_rope_needed() -> bool:
    from megatron.core.models.common.embeddings import rope_utils

    plain = getattr(rope_utils, _ROTATE)
    return ".tolist()" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply_packed_rope() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    plain = getattr(rope_utils, _ROTATE)

    @functools.wraps(plain)
    def without_waiting(t: Tensor, cu_seqlens: Tensor, *args: object, **kwargs: Upstream) -> Tensor:
        rotated: Tensor = plain(t, getattr(cu_seqlens, ON_HOST, cu_seqlens), *args, **kwargs)
        return rotated

    setattr(rope_utils, _ROTATE, without_waiting)


PACKED_ROPE = Patch(
    name="packed-rope",
    why="RoPE of packed rows synchronises with the GPU in every layer to read the lengths",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_packed_rope_needed,
    apply=_apply_packed_rope,
)
"""Read the lengths of packed sequences for RoPE from host memory.

Megatron's ``_apply_rotary_pos_emb_thd`` reads ``cu_seqlens`` as numbers, for queries and keys of every layer, and the
host synchronises each time. The code that packed the rows has the same tensor in host memory (`set_packed_lengths`),
which Megatron gets instead.
"""
