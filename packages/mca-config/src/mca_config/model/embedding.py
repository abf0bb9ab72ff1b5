"""Input embeddings: of words, positions, layers and media."""

from dataclasses import dataclass

from mca_config.model.section import Section, Share, Width
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Embedding(Section):
    """Computation between token ids and the first layer."""

    embedding_norm: bool = False
    """A norm without weights follows the word embedding."""
    embedding_layernorm: bool = False
    """A norm with weights follows the embeddings."""
    embedding_multiplier: float = 1.0
    """Factor on the word embeddings, rounded to their dtype."""
    embedding_dropout: Share = 0.0
    """Dropout of embeddings, used only if ``hidden_dropout`` is above 0 too."""
    learned_positions: bool = False
    """Learned position embeddings are added to the word embeddings; there is no RoPE."""
    position_offset: int = 0
    """Rows of the position embedding before the row of the first position."""
    pad_token_id: int | None = None
    """Token whose input embedding gets no gradient; None: all tokens get one."""


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding(Section):
    """A second embedding, which each layer takes in addition to the hidden states."""

    per_layer_input_size: Width
    """Channels for each layer."""


@dataclass(frozen=True, kw_only=True)
class Vision(Section):
    """The vision tower and its connection to the decoder."""

    vision_fields: JsonObject
    """Fields of ``config.json`` about the vision tower, its parameter prefix and its tokens."""
    deepstack_layers: int = 0
    """Number of first decoder layers after which features of inner vision layers are added to image tokens."""
    bidirectional_images: bool = False
    """The tokens of an image attend to each other in both directions, where ``config.json`` says so (Gemma 4)."""
