"""Lightning attention (MiniMax-Text-01): linear attention with a fixed decay for each head."""

from dataclasses import dataclass

from mca_config.model.section import Heads, Section, Width


@dataclass(frozen=True, kw_only=True)
class LightningAttention(Section):
    """Sizes of ``lightning`` layers."""

    lightning_num_heads: Heads
    """Heads, each with its own queries, keys and values; the decay of a head follows from its number."""
    lightning_head_dim: Width
    """Channels of a head."""
