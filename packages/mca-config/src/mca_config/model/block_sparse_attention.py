"""Block-sparse attention, whose indexer selects blocks of keys."""

from dataclasses import dataclass

from mca_config.model.section import Section
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(Section):
    """Block selection of ``sparse_attention`` layers."""

    index_blocks: JsonObject
    """An index query of ``channels`` for each key/value head selects ``topk`` blocks of ``size`` keys, always with the
    last ``local`` blocks."""
