"""The table of positions that the fused rotary embedding of MLA reads."""

from typing import Any

import torch

from mca_models.megatron import platform


class SecondOfTwo:
    """A group of two context ranks, as seen by the second."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def test_rows_shorter_than_the_longest_so_far_have_their_own_positions() -> None:
    platform.prepare()
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    group: Any = SecondOfTwo()
    sizes: dict[str, Any] = {"kv_channels": 8, "scaling_factor": 4.0, "original_max_position_embeddings": 32}
    rope = YarnRotaryEmbedding(**sizes, use_cpu_initialization=True, cp_group=group)
    for length, packed in ((64, False), (16, False), (16, True), (8, True), (32, False)):
        emb, scale = rope(length, 0, packed)
        cos, sin = rope.get_cached_cos_sin(length, dtype=torch.float32, packed_seq=packed)
        assert torch.equal(cos, emb.cos() * scale)
        assert torch.equal(sin, emb.sin() * scale)
