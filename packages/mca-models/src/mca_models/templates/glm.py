"""GLM 4 to 5, the text models, and Solar Open."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, HfConfig, Lens, dense_fields
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import attention, dense_mlp, embedding, fused_mlp, head, renamed
from mca_models.templates.parts.mla import SIGMOID_MLA
from mca_models.templates.parts.moe import (
    GROUPED_EXPERTS,
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    expert_fields,
    listed_moe_layers,
    moe_params,
    sigmoid_experts,
    write_groups,
)
from mca_models.templates.parts.mtp import mtp_copies
from mca_models.templates.parts.names import MoeNames
from mca_models.weights import Param, expand_rules

DEEPSEEK_V3 = get_family("deepseek_v3")
DEEPSEEK_V32 = get_family("deepseek_v32")


# GLM 4 9B: HF `GlmForCausalLM`: biases on q, k, v, gate and up in one tensor, half of each head is rotated.
def _glm_params(config: McaModelConfig) -> list[Param]:
    rules = [*attention(config), *dense_mlp(config, fused_mlp())]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(eps=1.5625e-07), Field("add_qkv_bias", "attention_bias", True)),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
        },
        constants={"rotary_interleaved": True},
        fixed=(SILU,),
        partial_rotary=True,
    ),
    params=_glm_params,
)


# GLM 4, dense: HF `Glm4ForCausalLM`: pre- and post-norms, one tensor for gate and up.
# Half of each head is rotated, in pairs of neighbours.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Names that differ from those of other families with pre- and post-norms."""


def _glm4_params(config: McaModelConfig) -> list[Param]:
    rules = renamed([*attention(config), *dense_mlp(config, fused_mlp())], _NORMS)
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    config=replace(GLM.table, constants={"norm_placement": "sandwich", **GLM.table.constants}),
    params=_glm4_params,
)


# GLM 4.5 and 4.6: HF `Glm4MoeForCausalLM`: sigmoid routing with a bias, partial rotary.
NAMES = MoeNames()
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            *expert_fields(count="n_routed_experts", default=128),
            Field("qk_layernorm", "use_qk_norm", False),
            Field("add_qkv_bias", "attention_bias", False),
            SCALED,
        ),
        defaults={
            "num_key_value_heads": 8,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        constants=SIGMOID_ROUTER,
        fixed=(SILU, NORMALISED),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        facts=(GROUPED_EXPERTS,),
        partial_rotary=True,
    ),
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
    copies=mtp_copies,
)


# GLM 4.7 Flash: HF `Glm4MoeLiteForCausalLM`: DeepSeek V3's layers, its dense ones listed.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    config=replace(
        DEEPSEEK_V3.table,
        defaults={
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "q_lora_rank": 768,
            "n_routed_experts": 64,
        },
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        facts=(SIGMOID_MLA, listed_moe_layers(1)),
    ),
)


# GLM 5: HF `GlmMoeDsaForCausalLM`: DeepSeek V3.2's layers; its indexer uses interleaved RoPE.
def require_indexers(hf: HfConfig) -> JsonObject:
    """Reject layers that take the keys that another layer chose."""
    pattern = hf.get("indexer_types") or hf.get("index_topk_pattern") or "F"
    if set(pattern) - {"F", "full"} or ((hf.get("index_topk_freq") or 1) > 1 and not hf.get("indexer_types")):
        raise HfConfigError(
            "config.json: 'indexer_types' (or 'index_topk_freq') has layers that take the keys chosen in an "
            "earlier layer; supported: an indexer in every layer"
        )
    return {}


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    config=replace(
        DEEPSEEK_V32.table,
        defaults={
            **{"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
            **{"first_k_dense_replace": 3, "q_lora_rank": 2048, "index_n_heads": 32},
        },
        constants={**DEEPSEEK_V32.table.constants, "index_rotary_interleaved": True},
        facts=(Lens(require_indexers), *DEEPSEEK_V32.table.facts),
    ),
)


# Solar Open: HF `SolarOpenForCausalLM`: GLM 4.5's experts in every layer, Llama's attention.
def derive(hf: HfConfig) -> JsonObject:
    """Experts in every layer; the keys of dense layers have no effect."""
    experts = sigmoid_experts({**hf, "first_k_dense_replace": 0})
    return {**experts, "ffn_hidden_size": hf["moe_intermediate_size"], "mtp_num_layers": 0}


SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in dense_fields(eps=1e-5) if field.mca != "ffn_hidden_size"),
            *expert_fields(count="n_routed_experts", default=128),
            Field("add_qkv_bias", "attention_bias", False),
            SCALED,
        ),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "n_shared_experts": 1},
        constants=SIGMOID_ROUTER,
        fixed=(SILU, NORMALISED, Fixed("use_qk_norm", (False,), "transformers ignores it")),
        aliases={"num_local_experts": "n_routed_experts"},
        facts=(Lens(derive, write_groups),),
    ),
    params=GLM4_MOE.params,
    moe=GLM4_MOE.moe,
)

FAMILIES = by_type(GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA, SOLAR_OPEN)
