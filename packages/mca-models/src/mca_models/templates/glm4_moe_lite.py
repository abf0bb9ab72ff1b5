"""GLM 4.7 Flash: HF ``Glm4MoeLiteForCausalLM``: DeepSeek V3's layers, its dense ones listed."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import deepseek_v3
from mca_models.templates.config_table import HfConfig

DENSE, SPARSE = "dense", "sparse"


def derive(hf: HfConfig) -> JsonObject:
    """What DeepSeek V3's table says; which layers have experts is a list, and all but the first if there is none."""
    kinds = hf.get("mlp_layer_types") or [DENSE] + [SPARSE] * (hf["num_hidden_layers"] - 1)
    return deepseek_v3.derive(hf) | {"moe_layer_freq": tuple(int(kind == SPARSE) for kind in kinds)}


def restore(config: McaModelConfig) -> HfConfig:
    """See ``ConfigTable.restore``."""
    kinds = [SPARSE if config.is_moe_layer(layer) else DENSE for layer in range(config.num_layers)]
    return {**deepseek_v3.restore_groups(config), "mlp_layer_types": kinds}


CONFIG = replace(
    deepseek_v3.CONFIG,
    defaults={
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "n_shared_experts": 1,
        "q_lora_rank": 768,
        "n_routed_experts": 64,
    },
    derive=derive,
    restore=restore,
)

FAMILY = replace(
    deepseek_v3.FAMILY, model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", config=CONFIG
)
