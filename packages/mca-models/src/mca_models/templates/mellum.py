"""Mellum 2: HF ``MellumForCausalLM``: Qwen 3's experts, windows, a rope for each kind of layer."""

from dataclasses import replace

from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.dual_rope import (
    FULL,
    PER_LAYER_TYPE,
    derive_dual_rope,
    write_dual_rope,
    write_layer_types,
)
from mca_models.templates.parts.moe import derive_moe_layers, sparse_layers, write_moe_layers, write_sparse
from mca_models.templates.parts.passthrough import with_mtp_passthrough

QWEN3_MOE = get_family("qwen3_moe")


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers and their ropes, and which have experts."""
    sparse = derive_moe_layers({**hf, "first_k_dense_replace": 0})
    kinds = hf.get("layer_types") or [FULL] * hf["num_hidden_layers"]
    ropes = derive_dual_rope(hf, 5e5, 1e4)
    return {**sparse_layers(hf), **sparse, **ropes, "layer_types": tuple(kinds)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    sparse = write_sparse(values) | write_moe_layers(values)
    return {**sparse, **write_dual_rope(values), **write_layer_types(values)}


CONFIG = replace(
    QWEN3_MOE.table,
    fields=(*QWEN3_MOE.table.fields, Field("window_size", "sliding_window", 1024)),
    defaults={"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True, "num_local_experts": 64},
    fixed=(*QWEN3_MOE.table.fixed, PER_LAYER_TYPE),
    aliases={"num_experts": "num_local_experts"},
    facts=(Lens(derive, write),),
)

FAMILY = with_mtp_passthrough(
    replace(
        QWEN3_MOE,
        model_type="mellum",
        architecture="MellumForCausalLM",
        config=CONFIG,
    )
)
