"""DeepSeek V3 and R1: HF ``DeepseekV3ForCausalLM``: latent attention, experts, multi-token prediction."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.common import ATTN, inner
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.moe import (
    SIGMOID_ROUTER,
    expert_fields,
    fuse_shared_experts,
    moe_params,
    require_sigmoid_routing,
    restore_shared_experts,
)
from mca_models.templates.mtp import mtp_copies
from mca_models.templates.names import HF_ATTN, MoeNames
from mca_models.weights import COLUMN, ROW, Concat, GroupedHeads, Interleaved, Param

NAMES = MoeNames()

LATENT_FIELDS = (
    Field("q_lora_rank", "q_lora_rank", None),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_head_dim", "qk_nope_head_dim"),
    Field("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    Field("v_head_dim", "v_head_dim"),
)
SCALED = Field("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0)
MLA_FIELDS = (
    *(field for field in dense_fields() if field.mca != "kv_channels"),
    *expert_fields(count="n_routed_experts", default=256),
    *LATENT_FIELDS,
    SCALED,
)
NORMALISED = Fixed("norm_topk_prob", (True,), "Megatron normalises sigmoid scores over the chosen experts")
INTERLEAVED = Fixed("rope_interleave", (True,), "Megatron's latent attention rotates pairs of neighbours")


def sigmoid_experts(hf: HfConfig) -> JsonObject:
    """``grouped_experts``, chosen by sigmoid scores."""
    require_sigmoid_routing(hf)
    return grouped_experts(hf)


def grouped_experts(hf: HfConfig) -> JsonObject:
    """Dense first layers, shared experts as one wide one, and group-limited routing."""
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace") or 0
    groups = hf.get("n_group") or 1
    return {
        "moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers)),
        **fuse_shared_experts(hf, "n_shared_experts", 0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": (hf.get("topk_group") or 1) if groups > 1 else None,
        "mtp_num_layers": hf.get("num_nextn_predict_layers") or 0,
    }


def restore_groups(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    dense = [layer for layer in range(config.num_layers) if not config.is_moe_layer(layer)]
    return {
        "first_k_dense_replace": len(dense),
        **restore_shared_experts(config, "n_shared_experts"),
        "n_group": given(config.moe).moe_router_num_groups or 1,
        "topk_group": given(config.moe).moe_router_group_topk or 1,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


def mla(hf: HfConfig) -> JsonObject:
    """Derive ``grouped_experts``, and the head dimension of queries and keys."""
    return {**grouped_experts(hf), "kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]}


def derive(hf: HfConfig) -> JsonObject:
    """Derive ``mla`` with sigmoid routing."""
    require_sigmoid_routing(hf)
    return mla(hf)


CONFIG = ConfigTable(
    fields=MLA_FIELDS,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "num_nextn_predict_layers": 1,
    },
    constants={"qk_layernorm": True, **SIGMOID_ROUTER},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NORMALISED,
        Fixed("scoring_func", ("sigmoid",), "DeepSeek V3's router"),
        Fixed("topk_method", ("noaux_tc",), "DeepSeek V3's router"),
        Fixed("moe_layer_freq", (1,), "every layer after the first dense ones has experts"),
        INTERLEAVED,
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    derive=derive,
    restore=restore_groups,
)


def latent_attention(config: McaModelConfig) -> list[Param]:
    """Pre-norm multi-head latent attention, its queries compressed or not."""
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
    return [
        inner("input_layernorm.weight", "input_layernorm.weight"),
        *query,
        inner("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", **key),
        inner("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
        inner("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", shard=COLUMN),
        Param(mca=f"{ATTN}linear_proj.weight", hf=(f"{HF_ATTN}o_proj.weight",), shard=ROW),
    ]


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return moe_params(config, NAMES, latent_attention(config))


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
    copies=mtp_copies,
)
