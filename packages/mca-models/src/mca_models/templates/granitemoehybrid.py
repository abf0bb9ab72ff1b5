"""Granite 4: HF ``GraniteMoeHybridForCausalLM``: Granite with Mamba 2 layers, and MLPs or experts with a shared one."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, Field, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import embedding, head, inner
from mca_models.templates.parts.mamba import (
    BAMBA,
    PLAIN_STEPS,
    bamba_fields,
    derive_bamba,
    layer_types_from_hf,
    layer_types_to_hf,
    mixed_layers,
    write_bamba,
)
from mca_models.templates.parts.moe import aux_loss, detect_stacked_experts, write_aux_loss
from mca_models.templates.parts.stacked_experts import expert_layers
from mca_models.weights import GATED, ROW, Param, expand_rules

GRANITE = get_family("granite")


def derive(hf: HfConfig) -> JsonObject:
    """Derive the type of each layer, whether positions are rotated, and the experts."""
    layers = hf["num_hidden_layers"]
    kinds = layer_types_from_hf(hf.get("layer_types") or hf.get("layers_block_type") or ["mamba"] * layers)
    values = {
        **{"layer_types": kinds, **derive_bamba(hf)},
        "no_rope_freq": None if hf.get("position_embedding_type") == "rope" else (1,) * layers,
    }
    experts, shared = hf["num_local_experts"] or None, hf["shared_intermediate_size"]
    if experts is None:
        return {**values, "ffn_hidden_size": shared}
    inside = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
    }
    return {**values, **inside, **aux_loss(hf)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    dense = values["num_moe_experts"] is None
    return {
        **{"layer_types": layer_types_to_hf(values), **write_bamba(values), **write_aux_loss(values)},
        "num_local_experts": values["num_moe_experts"] or 0,
        "shared_intermediate_size": values["ffn_hidden_size"]
        if dense
        else values["moe_shared_expert_intermediate_size"],
        "position_embedding_type": None if values["no_rope_freq"] else "rope",
    }


CONFIG = ConfigTable(
    fields=(*GRANITE.table.fields, Field("moe_router_topk", "num_experts_per_tok"), *bamba_fields()),
    defaults={
        **{**BAMBA, "num_experts_per_tok": 2},
        **{"num_local_experts": 8, "shared_intermediate_size": 1024},
    },
    fixed=(SILU, NO_ATTENTION_BIAS, PLAIN_STEPS),
    aliases={"layers_block_type": "layer_types"},
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = range(config.num_layers)
    dense = [
        inner("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        inner("mlp.linear_fc1.weight", "shared_mlp.input_linear.weight", shard=GATED),
        inner("mlp.linear_fc2.weight", "shared_mlp.output_linear.weight", shard=ROW),
    ]
    after = expert_layers(config, layers) if config.num_experts else expand_rules(dense, layers=layers)
    return [embedding(), *mixed_layers(config), *after, *head(config)]


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_stacked_experts,
)
