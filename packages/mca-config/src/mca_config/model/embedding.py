"""Word embeddings and learned position embeddings."""

from dataclasses import dataclass

from mca_config.model.section import Section, Share


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
