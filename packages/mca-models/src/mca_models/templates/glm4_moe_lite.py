"""GLM 4.7 Flash: HF ``Glm4MoeLiteForCausalLM``: DeepSeek V3's layers, its dense ones listed."""

from dataclasses import replace

from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.mla import derive_sigmoid_mla
from mca_models.templates.parts.moe import derive_moe_layers, write_groups, write_moe_layers

DEEPSEEK_V3 = get_family("deepseek_v3")


def derive(hf: HfConfig) -> JsonObject:
    """Derive as DeepSeek V3; the layers with experts are listed, or all but the first."""
    return derive_sigmoid_mla(hf) | derive_moe_layers({**hf, "first_k_dense_replace": 1})


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {**write_groups(values), **write_moe_layers(values)}


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
    facts=(Lens(derive, write),),
)

FAMILY = replace(
    DEEPSEEK_V3, model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", config=CONFIG
)
