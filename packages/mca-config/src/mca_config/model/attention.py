"""Self-attention: heads, projections, scores and the keys that a query attends to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import LARGEST, Heads, ModelSizes, Positions, Section, Share, Width
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Attention(Section):
    """Grouped-query attention; with MLA, only its number of heads and its scores."""

    num_attention_heads: Heads
    num_query_groups: Heads
    """Key/value heads."""
    kv_channels: Width
    """Head dimension."""
    value_channels: Width | None = None
    """Value channels of a head; None: ``kv_channels``."""
    values_are_keys: bool = False
    """The values are the keys before their norm: there is no value projection."""
    value_norm: bool = False
    """Values pass a norm without weights."""
    value_scale: float = 1.0
    """Factor on values."""
    add_qkv_bias: bool = False
    add_bias_attention: bool | None = None
    """Biases on the linear layers of attention, including the output projection; None: as ``add_bias_linear``."""
    attention_output_gate: bool = False
    """A sigmoid gate, projected together with q, multiplies each head's output."""
    head_gate: bool = False
    """A sigmoid gate for each head, projected together with q, k and v, multiplies the head's output."""
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to plus or minus this value before RoPE; None: no clipping."""

    qk_layernorm: bool = False
    qk_layernorm_full_width: bool = False
    """The norms of q and k span all heads together and have a weight for each channel of each head."""
    qk_layernorm_after_rope: bool = False
    """q and k are normalized after RoPE, not before; layers without RoPE have no such norm."""
    qk_layernorm_per_head: bool = False
    """The norms of q and k have separate weights for each head, without biases."""
    qk_layernorm_weight: bool = True

    softmax_scale: float | None = None
    """Factor on attention scores; None: ``kv_channels ** -0.5``."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """``learnable``: each head has an attention sink, a learned logit in addition to those of its keys."""
    attn_logit_softcapping: float | None = None
    """Soft cap c of attention scores: ``c * tanh(x / c)``; None: no cap."""
    attn_temperature: JsonObject | None = None
    """``beta``, ``length``, ``first`` of the query temperature: queries at position p are multiplied by
    ``1 + beta ln(1 + floor((p + first) / length))``, only in layers without RoPE if there are any; None: no factor."""
    alibi: bool = False
    """ALiBi instead of RoPE: a per-head slope times the key position is added to the attention scores."""
    attention_dropout: Share = 0.0
    window_size: Positions | None = None
    """Tokens in the window of a sliding-window layer, including the query; None: full causal attention."""
    attention_chunk_size: int | None = None
    """Chunk length of ``chunked_attention`` layers, in which a query attends only within its chunk."""

    @property
    def value_width(self) -> int:
        """Value channels of a head."""
        return self.kv_channels if self.value_channels is None else self.value_channels

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield contradictions between the numbers of heads."""
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            yield f"num_attention_heads {heads} is not a multiple of num_query_groups {groups}"
        if heads * self.kv_channels > LARGEST:
            yield f"num_attention_heads {heads} times kv_channels {self.kv_channels} must be at most {LARGEST}"
