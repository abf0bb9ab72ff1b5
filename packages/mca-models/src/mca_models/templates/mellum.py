"""Mellum 2: HF ``MellumForCausalLM``: Qwen 3's experts, windows, a rope for each kind of layer."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import qwen3_moe
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.dual_rope import (
    FULL,
    PER_LAYER_TYPE,
    derive_dual_rope,
    restore_dual_rope,
    restore_layer_types,
)
from mca_models.templates.moe import derive_moe_layers, restore_moe_layers
from mca_models.templates.passthrough import with_mtp_passthrough


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers and their ropes, and which have experts."""
    sparse = derive_moe_layers({**hf, "first_k_dense_replace": 0})
    kinds = hf.get("layer_types") or [FULL] * hf["num_hidden_layers"]
    ropes = derive_dual_rope(hf, 5e5, 1e4)
    return {**qwen3_moe.sparse_layers(hf), **sparse, **ropes, "layer_types": tuple(kinds)}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    sparse = qwen3_moe.restore_sparse(config) | restore_moe_layers(config)
    return {**sparse, **restore_dual_rope(config), **restore_layer_types(config)}


CONFIG = replace(
    qwen3_moe.CONFIG,
    fields=(*qwen3_moe.CONFIG.fields, Field("window_size", "sliding_window", 1024)),
    defaults={"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True, "num_local_experts": 64},
    fixed=(*qwen3_moe.CONFIG.fixed, PER_LAYER_TYPE),
    aliases={"num_experts": "num_local_experts"},
    derive=derive,
    restore=restore,
)

FAMILY = with_mtp_passthrough(
    replace(
        qwen3_moe.FAMILY,
        model_type="mellum",
        architecture="MellumForCausalLM",
        config=CONFIG,
    )
)
