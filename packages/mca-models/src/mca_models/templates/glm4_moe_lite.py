"""GLM 4.7 Flash: HF ``Glm4MoeLiteForCausalLM``: DeepSeek V3's layers, its dense ones listed."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.parts.mla import SIGMOID_MLA
from mca_models.templates.parts.moe import listed_moe_layers

DEEPSEEK_V3 = get_family("deepseek_v3")


CONFIG = replace(
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
)

FAMILY = replace(
    DEEPSEEK_V3, model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", config=CONFIG
)
