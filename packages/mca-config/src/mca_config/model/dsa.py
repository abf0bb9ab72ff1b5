"""DeepSeek sparse attention (DSA), whose indexer selects keys for MLA."""

from dataclasses import dataclass

from mca_config.model.section import Section, Width


@dataclass(frozen=True, kw_only=True)
class Dsa(Section):
    """Sizes of the indexer."""

    index_topk: int
    """Keys that the indexer selects for each query."""
    index_num_heads: Width
    index_head_dim: Width
    index_rotary_interleaved: bool = False
    """The RoPE of the indexer interleaves the channels of a pair."""
