"""LFM2 MoE: HF ``Lfm2MoeForCausalLM``: LFM2 with sigmoid routing and an expert bias after the first layers."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Fixed, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens, is_moe_layer
from mca_models.templates.parts.common import embedding, head
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    SIGMOID_ROUTING,
    expert_fields,
    mlp_layers,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.short_convolution import (
    DEFAULTS,
    FIELDS,
    LAYER_TYPES,
    NO_CONV_BIAS,
    lfm2_names,
    mixers,
)
from mca_models.weights import Param

NAMES = MoeNames(
    router="feed_forward.gate.weight",
    router_bias="feed_forward.expert_bias",
    experts="feed_forward.experts.",
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)


def read(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts: all but the first ``num_dense_layers``."""
    dense = hf.get("num_dense_layers", 2)
    return {"moe_layer_freq": tuple(int(layer >= dense) for layer in range(hf["num_hidden_layers"]))}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"num_dense_layers": sum(not is_moe_layer(values, layer) for layer in range(values["num_layers"]))}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return lfm2_names([embedding(), *mixers(config), *mlp_layers(config, NAMES), *head(config)])


FAMILY = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    config=ConfigTable(
        fields=(*FIELDS, *expert_fields(count="num_experts", default=32), SCALED),
        defaults={**DEFAULTS, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
        constants={"qk_layernorm": True, **SIGMOID_ROUTER},
        fixed=(NO_CONV_BIAS, NORMALISED, Fixed("use_expert_bias", (True,), "all published models have it")),
        aliases={"tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts"},
        facts=(LAYER_TYPES, SIGMOID_ROUTING, Lens(read, write)),
    ),
    params=params,
    moe=NAMES,
)
