"""Multi-head latent attention (MLA)."""

from dataclasses import dataclass

from mca_config.model.section import Section, Width


@dataclass(frozen=True, kw_only=True)
class Mla(Section):
    """Widths of the compressed queries, keys and values."""

    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_head_dim: Width
    """No-rope channels of a query or key head."""
    qk_pos_emb_head_dim: Width
    v_head_dim: Width
    rotary_halves: bool = False
    """Checkpoints store RoPE channels as two halves, while Megatron interleaves the channels of a pair."""
    latent_head_gate: bool = False
    """A sigmoid gate for each head multiplies the head's output."""
    query_multiplier: float = 1.0
    """Factor on queries."""
    latent_multiplier: float = 1.0
    """Factor on the compressed keys and values after their norm, but not on the RoPE channels of keys."""
