"""Qwen 3.5, the text models: HF ``Qwen3_5ForCausalLM`` and ``Qwen3_5MoeForCausalLM``: gated delta net and attention."""

from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head
from mca_models.templates.parts.gated_delta_net import PREFIX_KEY, detect_prefix, in_proj, prefixed
from mca_models.templates.parts.moe import AUX_LOSS, SHARED_WIDTH, expert_fields, last_layer, mlp_layers
from mca_models.templates.parts.mtp import OWN_EMBEDDING, mtp_params
from mca_models.templates.parts.names import MoeNames
from mca_models.weights import Param, expand_rules

CONFIG = ConfigTable(
    fields=(*dense_fields(), *delta.FIELDS),
    defaults={**delta.DEFAULTS, "num_key_value_heads": 4},
    constants=delta.CONSTANTS,
    fixed=(SILU, NO_ATTENTION_BIAS, OWN_EMBEDDING),
    facts=(delta.MIXED_LAYERS,),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    inside = [*attention(config), *dense_mlp(config)]
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    mlp = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return prefixed(config, [embedding(), *layers, *mlp, *mtp, *head(config)])


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_prefix,
    count_mtp=delta.detect_mtp_layers,
    module_names={PREFIX_KEY: ""},
)


def expert_width(hf: HfConfig) -> Typed:
    """No layer has a dense MLP, so its width is of no consequence."""
    return hf["moe_intermediate_size"]


NAMES = MoeNames(shared="mlp.shared_expert.")
SIZES = tuple(field for field in dense_fields() if field.mca != "ffn_hidden_size")

MOE_CONFIG = ConfigTable(
    fields=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size", expert_width),
        *expert_fields(count="num_experts", default=256),
        SHARED_WIDTH,
        *delta.FIELDS,
    ),
    defaults={**delta.DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512},
    constants={**delta.CONSTANTS, "moe_shared_expert_gate": True},
    fixed=(SILU, NO_ATTENTION_BIAS, OWN_EMBEDDING),
    facts=(delta.MIXED_LAYERS, AUX_LOSS),
    partial_rotary=True,
)


def moe_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    inside = last_layer(config, NAMES, attention(config))
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    return prefixed(config, [embedding(), *layers, *mlp_layers(config, NAMES), *mtp, *head(config)])


MOE_FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    config=MOE_CONFIG,
    params=moe_params,
    moe=NAMES,
    detect_extra=detect_prefix,
    count_mtp=delta.detect_mtp_layers,
    module_names={PREFIX_KEY: ""},
)
