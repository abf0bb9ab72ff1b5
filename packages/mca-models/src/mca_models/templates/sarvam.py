"""Sarvam 30B and 105B: HF ``Glm4MoeForCausalLM`` and ``DeepseekV3ForCausalLM`` with other values and names."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import Field, Fixed, HfConfig, Lens, read_rope
from mca_models.templates.family import by_type
from mca_models.templates.parts.common import attention, fused_qkv, renamed
from mca_models.templates.parts.moe import moe_params
from mca_models.templates.parts.names import MoeNames
from mca_models.weights import Param

GLM4_MOE, DEEPSEEK_V3 = get_family("glm4_moe"), get_family("deepseek_v3")
MODULES = "module_names"
NAMES = MoeNames(
    router_bias="mlp.gate.expert_bias", in_memory=(("gate.expert_bias", "gate.e_score_correction_bias"),)
)
FILES = {
    **{".self_attn.qkv_proj": ".attention.query_key_value", ".self_attn.o_proj": ".attention.dense"},
    **{".self_attn.q_norm": ".attention.query_layernorm", ".self_attn.k_norm": ".attention.key_layernorm"},
    "embed_tokens": "word_embeddings",
}
WITHOUT_MTP = Fixed("num_nextn_predict_layers", (0, None), "published models have no MTP layers")
COUNTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the 30B model, in checkpoint order."""
    if config.extra.get("fused_experts") or config.extra.get(MODULES):
        return moe_params(config, NAMES)
    return renamed(moe_params(config, NAMES, attention(config, fused_qkv(config))), FILES)


MOE = replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    config=replace(
        GLM4_MOE.table,
        fields=tuple(
            replace(field, default=True) if field.mca == "qk_layernorm" else field
            for field in GLM4_MOE.table.fields
            if field.mca != "add_qkv_bias"
        ),
        defaults={
            **{"num_key_value_heads": 4, "head_dim": 64, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"moe_intermediate_size": 1024, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5},
            **{"rope_theta": 8e6, "pad_token_id": 0, "initializer_range": 0.006},
        },
        fixed=(
            *(*GLM4_MOE.table.fixed, WITHOUT_MTP),
            Fixed("attention_bias", (False,), "published models have no biases on q, k and v"),
        ),
        aliases={**GLM4_MOE.table.aliases, **COUNTS, "use_qkv_bias": "attention_bias"},
    ),
    params=params,
    moe=NAMES,
    module_names={MODULES: True},
)


def yarn(hf: HfConfig) -> JsonObject:
    """Return the rope, whose YaRN published files call ``deepseek_yarn``."""
    given = hf.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type")
    if kind == "deepseek_yarn":
        hf = {**hf, "rope_scaling": {**given, "rope_type": "yarn"}}
    return read_rope(hf)


MLA = replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    config=replace(
        DEEPSEEK_V3.table,
        fields=tuple(
            Field("num_moe_experts", "n_routed_experts", 128) if field.mca == "num_moe_experts" else field
            for field in DEEPSEEK_V3.table.fields
        ),
        defaults={
            **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
            **{"n_group": 1, "topk_group": 1, "initializer_range": 0.006},
        },
        fixed=(*DEEPSEEK_V3.table.fixed, WITHOUT_MTP),
        aliases={**DEEPSEEK_V3.table.aliases, **COUNTS},
        facts=(*DEEPSEEK_V3.table.facts, Lens(yarn)),
    ),
)

FAMILIES = by_type(MOE, MLA)
