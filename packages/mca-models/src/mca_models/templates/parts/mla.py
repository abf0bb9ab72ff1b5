"""Multi-head latent attention (MLA)."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Field, Fixed, HfConfig, Lens, dense_fields
from mca_models.templates.parts.common import ATTN, dense_mlp, embedding, head, inner
from mca_models.templates.parts.layer_costs import SINGLE, LatentSizes, LayerSizes, SavedTensor
from mca_models.templates.parts.moe import (
    SCALED,
    expert_fields,
    grouped_experts,
    moe_params,
    require_sigmoid_routing,
    write_groups,
)
from mca_models.templates.parts.names import HF_ATTN, MoeNames
from mca_models.weights import COLUMN, ROW, Concat, GroupedHeads, Interleaved, Param, expand_rules

_SOURCE = "megatron/core/transformer/multi_latent_attention.py: get_query_key_value_tensors"
_GATE = "mca_models/megatron/features/mla.py: _apply_gate"
_SDPA = "mca_models/megatron/layers/sdpa.py: scaled_dot_product_attention"
LATENT_FIELDS = (
    Field("q_lora_rank", "q_lora_rank", None),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_head_dim", "qk_nope_head_dim"),
    Field("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    Field("v_head_dim", "v_head_dim"),
)


MLA_FIELDS = (
    *(field for field in dense_fields() if field.mca != "kv_channels"),
    *expert_fields(count="n_routed_experts", default=256),
    *LATENT_FIELDS,
    SCALED,
)


INTERLEAVED = Fixed("rope_interleave", (True,), "Megatron's MLA uses interleaved RoPE")


def derive_mla(hf: HfConfig) -> JsonObject:
    """Derive ``grouped_experts``, and the head dimension of queries and keys."""
    return {**grouped_experts(hf), "kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]}


def derive_sigmoid_mla(hf: HfConfig) -> JsonObject:
    """Derive ``derive_mla`` with sigmoid routing."""
    require_sigmoid_routing(hf)
    return derive_mla(hf)


def latent_attention(config: McaModelConfig) -> list[Param]:
    """Pre-norm MLA, its queries compressed or not."""
    still, latent, turned = (
        given(config.mla).qk_head_dim,
        given(config.mla).kv_lora_rank,
        given(config.mla).qk_pos_emb_head_dim,
    )
    queries: Values = {}
    key: Values = {}
    if given(config.mla).rotary_halves:
        layout = Interleaved(GroupedHeads((still, turned), 1))
        queries = {"layout": layout, "hf_layout": GroupedHeads((still, turned // 2, turned // 2), 1)}
        layout = Interleaved(Concat((latent, turned)))
        key = {"layout": layout, "hf_layout": Concat((latent, turned // 2, turned // 2))}
    if given(config.mla).q_lora_rank:
        query = [
            inner("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
            inner("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
            inner(
                "self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", shard=COLUMN, **queries
            ),
        ]
    else:
        query = [
            inner("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", shard=COLUMN, **queries)
        ]
    gate = [inner("self_attention.linear_head_gate.weight", "self_attn.g_proj.weight", shard=COLUMN)]
    if not given(config.mla).latent_head_gate:
        gate = []
    return [
        inner("input_layernorm.weight", "input_layernorm.weight"),
        *query,
        inner("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", **key),
        inner("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
        inner("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", shard=COLUMN),
        *gate,
        Param(mca=f"{ATTN}linear_proj.weight", hf=(f"{HF_ATTN}o_proj.weight",), shard=ROW),
    ]


def mla_moe_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return moe_params(config, MoeNames(), latent_attention(config))


def key_channels(hf: HfConfig) -> JsonObject:
    """The head dimension of a query or key."""
    return {"kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]}


def mla_dense_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*latent_attention(config), *dense_mlp(config)]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


MLA = Lens(derive_mla, write_groups)
SIGMOID_MLA = Lens(derive_sigmoid_mla, write_groups)


def latent_sizes(config: McaModelConfig) -> LatentSizes | None:
    """Return the sizes of MLA; None: the model has other attention."""
    mla = config.mla
    if mla is None:
        return None
    query = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    up = (mla.q_lora_rank or config.hidden_size) * query + mla.kv_lora_rank * (
        mla.qk_head_dim + mla.v_head_dim
    )
    return LatentSizes(
        ranks=tuple(rank for rank in (mla.q_lora_rank, mla.kv_lora_rank) if rank),
        query=query,
        value=mla.v_head_dim,
        down=config.hidden_size * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
        per_head=up + (mla.v_head_dim + mla.latent_head_gate) * config.hidden_size,
    )


def saved_core(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of mca's core attention with MLA."""
    tokens, width, tp = sizes.tokens, sizes.width, sizes.layout.tp
    heads = config.attention.num_attention_heads / tp
    key = heads * (given(config.mla).qk_head_dim + given(config.mla).qk_pos_emb_head_dim)
    value = heads * given(config.mla).v_head_dim
    return [
        SavedTensor("queries and keys", tokens * key * 2 * width, _SOURCE, "mla_up_proj"),
        SavedTensor("values, padded to the keys", tokens * key * width, _SDPA, "core_attn"),
        SavedTensor("attention's output, padded", tokens * key * width, _SDPA, "core_attn"),
        SavedTensor("attention's output", tokens * value * width, _SDPA),
        *(
            [SavedTensor("gated output, and gates", tokens * (value + 2 * heads) * width, _GATE)]
            if given(config.mla).latent_head_gate
            else []
        ),
        SavedTensor("log-sum-exp of attention", tokens * heads * SINGLE, _SDPA, "core_attn"),
    ]
