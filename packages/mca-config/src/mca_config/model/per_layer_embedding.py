"""Per-layer embeddings."""

from dataclasses import dataclass

from mca_config.model.section import Section, Width


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding(Section):
    """A second embedding, which each layer takes in addition to the hidden states."""

    per_layer_input_size: Width
    """Channels for each layer."""
