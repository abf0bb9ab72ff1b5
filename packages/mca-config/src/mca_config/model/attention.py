"""Self-attention: heads, projections, scores and the keys that a query attends to.

MLA, the sparse attentions and shared KV are sections that a model may have in addition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.model.section import LARGEST, Heads, Layers, ModelSizes, Positions, Section, Share, Width
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


@dataclass(frozen=True, kw_only=True)
class Dsa(Section):
    """Sizes of the indexer."""

    index_topk: int
    """Keys that the indexer selects for each query."""
    index_num_heads: Width
    index_head_dim: Width
    index_rotary_interleaved: bool = False
    """The RoPE of the indexer interleaves the channels of a pair."""


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(Section):
    """Block selection of ``sparse_attention`` layers."""

    index_blocks: JsonObject
    """An index query of ``channels`` for each key/value head selects ``topk`` blocks of ``size`` keys, always with the
    last ``local`` blocks."""


@dataclass(frozen=True, kw_only=True)
class SharedKv(Section):
    """Layers with shared KV."""

    num_kv_shared_layers: Layers
    """Number of last layers with shared KV: each uses the keys and values of the last earlier layer of its type that
    projects its own."""
    double_wide_mlp: bool = False
    """Layers with shared KV have an MLP of twice the width."""
    accepts_keys: bool = False
    """This is the configuration of a layer with shared KV (see ``layer_config``), which projects only queries."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield a layer type whose keys no earlier layer projects."""
        layers, shared = model.num_layers, self.num_kv_shared_layers
        first = max(layers - shared, 0)
        kinds = model.layer_types or ("attention",) * layers
        if missing := sorted({*kinds[first:]} - {*kinds[:first]}):
            yield (
                f"num_kv_shared_layers {shared} of {layers} leaves no layer of type {missing[0]} whose keys and values "
                "the last layers could share; lower it"
            )
