"""Sections of a model's configuration, one class for each feature, and the table of them.

Every flat field name belongs to one section or to the model itself.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mca_config.model.attention import Attention, BlockSparseAttention, Dsa, Mla, SharedKv
from mca_config.model.block import Block, Mlp, Norm
from mca_config.model.embedding import Embedding, PerLayerEmbedding, Vision
from mca_config.model.head import Mtp, OutputHead
from mca_config.model.moe import Moe
from mca_config.model.recurrent_layers import (
    LightningAttention,
    LinearAttention,
    Mamba,
    SelectiveScan,
    ShortConvolution,
)
from mca_config.model.rope import MRope, Rope
from mca_config.model.section import Section
from mca_config.types import JsonObject, Values


@dataclass(frozen=True)
class Entry:
    """A section of the configuration.

    Args:
        cls: Its class.
        key: The field without which a model has no such section; None: every model has the section.
        absent: Values of that field that mean that the model has no such section; the first is the usual one.
    """

    cls: type[Section]
    key: str | None = None
    absent: tuple[object, ...] = (None,)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the section's fields."""
        return tuple(field.name for field in dataclasses.fields(self.cls))  # type: ignore[arg-type]


_COUNT = (0, None)
SECTIONS: Mapping[str, Entry] = {
    "attention": Entry(Attention),
    "rope": Entry(Rope),
    "mlp": Entry(Mlp),
    "norm": Entry(Norm),
    "block": Entry(Block),
    "embedding": Entry(Embedding),
    "head": Entry(OutputHead),
    "mtp": Entry(Mtp),
    "moe": Entry(Moe, "num_moe_experts"),
    "mla": Entry(Mla, "kv_lora_rank"),
    "dsa": Entry(Dsa, "index_topk"),
    "block_sparse_attention": Entry(BlockSparseAttention, "index_blocks"),
    "linear_attention": Entry(LinearAttention, "linear_conv_kernel_dim"),
    "lightning_attention": Entry(LightningAttention, "lightning_num_heads"),
    "mamba": Entry(Mamba, "mamba_num_heads"),
    "selective_scan": Entry(SelectiveScan, "scan_channels"),
    "short_convolution": Entry(ShortConvolution, "short_conv_kernel_dim"),
    "shared_kv": Entry(SharedKv, "num_kv_shared_layers", _COUNT),
    "per_layer_embedding": Entry(PerLayerEmbedding, "per_layer_input_size", _COUNT),
    "mrope": Entry(MRope, "mrope_section", (None, ())),
    "vision": Entry(Vision, "vision_fields"),
}
SECTION_OF: Mapping[str, str] = {name: section for section, entry in SECTIONS.items() for name in entry.names}
"""The section of each field."""
DEFAULTS: Values = {
    field.name: field.default
    for entry in SECTIONS.values()
    for field in dataclasses.fields(entry.cls)  # type: ignore[arg-type]
    if field.default is not dataclasses.MISSING
}
"""Values of fields that need not be given."""


def group_fields(values: Values) -> tuple[JsonObject, dict[str, JsonObject | None]]:
    """Return the fields of the model itself, and the fields of each section; None: the model has no such section."""
    own = {name: value for name, value in values.items() if name not in SECTION_OF}
    sections: dict[str, JsonObject | None] = {}
    for section, entry in SECTIONS.items():
        present = entry.key is None or values.get(entry.key) not in entry.absent
        fields = {name: values[name] for name in entry.names if name in values}
        sections[section] = fields if present else None
    return own, sections
