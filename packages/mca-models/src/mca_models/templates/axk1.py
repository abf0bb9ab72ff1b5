"""A.X K1: HF ``AXK1ForCausalLM``: DeepSeek V3's layers, with a norm after MoE layers.

Published files have no expert biases, which transformers then sets to 0, and hold the norm in dense layers too, where
nothing reads it.
"""

from collections.abc import Collection
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.templates import get_family
from mca_models.templates.parts.mla import SIGMOID_MLA, latent_attention
from mca_models.templates.parts.moe import listed_moe_layers, moe_params
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.weights import Param

DEEPSEEK_V3 = get_family("deepseek_v3")
NAMES = MoeNames(in_memory=(("post_mlp_layernorm", "mlp.post_mlp_layernorm"),))


CONFIG = replace(
    DEEPSEEK_V3.table,
    defaults={
        **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        **{"n_shared_experts": 1, "q_lora_rank": 1536, "n_routed_experts": 192},
    },
    constants={**DEEPSEEK_V3.table.constants, "moe_post_norm": True},
    aliases={"num_local_experts": "n_routed_experts"},
    facts=(SIGMOID_MLA, listed_moe_layers(1)),
)


def params(config: McaModelConfig) -> list[Param]:
    """Return every parameter of the model, in checkpoint order."""
    return moe_params(config, NAMES, latent_attention(config))


def unused_norms(config: McaModelConfig) -> frozenset[str]:
    """Return the names of the norms after dense layers."""
    dense = (layer for layer in range(config.num_layers) if not config.is_moe_layer(layer))
    return frozenset(HF.format(layer=layer) + NAMES.post_norm for layer in dense)


def detect_biases(config: McaModelConfig, names: Collection[str]) -> Values:
    """Return no expert biases if no tensor has them."""
    if any(name.endswith("e_score_correction_bias") for name in names):
        return {}
    return {"moe_router_enable_expert_bias": False}


FAMILY = replace(
    DEEPSEEK_V3,
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
    ignored_hf=unused_norms,
    detect_fields=detect_biases,
)
