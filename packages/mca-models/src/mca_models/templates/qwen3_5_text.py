"""Qwen 3.5, the text model: HF ``Qwen3_5ForCausalLM``: gated delta net and gated attention."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head
from mca_models.templates.parts.gated_delta_net import PREFIX_KEY, detect_prefix, in_proj, prefixed
from mca_models.templates.parts.mtp import OWN_EMBEDDING, mtp_params
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
