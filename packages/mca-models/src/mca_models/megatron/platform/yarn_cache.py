"""Reset the cached table of fused RoPE in MLA if the row length changes under context parallelism.

``YarnRotaryEmbedding.get_cached_cos_sin`` keeps the table of the longest rows so far, for rows that are not packed
already sharded to the two chunks of this context rank. A prefix of it is not the chunks of shorter rows: every layer
would use positions of the longer ones.
"""

import functools
import inspect

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _embedding() -> Upstream:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return YarnRotaryEmbedding


def _needed() -> bool:
    cached = _embedding().get_cached_cos_sin
    by_longest = "seq_len > self.max_seq_len_cached" in inspect.getsource(cached)
    return by_longest and not hasattr(cached, "__wrapped__")


def _apply() -> None:
    embedding = _embedding()
    cached = embedding.get_cached_cos_sin

    @functools.wraps(cached)
    def with_current_length(self: Upstream, seq_len: int, *args: object, **kwargs: object) -> Upstream:
        is_cut = self.cp_group is not None and self.cp_group.size() > 1 and not self.packed_seq_cached
        if is_cut and seq_len != self.max_seq_len_cached:
            self.max_seq_len_cached = 0
        return cached(self, seq_len, *args, **kwargs)

    embedding.get_cached_cos_sin = with_current_length


PATCH = Patch(
    name="yarn-cache",
    why="fused RoPE of MLA uses positions of longer rows under context parallelism",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
