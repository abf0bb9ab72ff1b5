"""Granite 3 with experts: HF ``GraniteMoeForCausalLM``: stacked experts, Granite's factors."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable
from mca_models.templates.family import Family
from mca_models.templates.parts.common import attention, embedding, head
from mca_models.templates.parts.moe import AUX_LOSS, detect_stacked_experts, expert_fields
from mca_models.templates.parts.stacked_experts import expert_layers
from mca_models.weights import Param, expand_rules

GRANITE = get_family("granite")

CONFIG = ConfigTable(
    fields=(
        *GRANITE.table.fields,
        *expert_fields(count="num_local_experts", default=8, ffn="intermediate_size"),
    ),
    defaults={"num_experts_per_tok": 2},
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(AUX_LOSS,),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = range(config.num_layers)
    before = expand_rules(attention(config), layers=layers)
    return [embedding(), *before, *expert_layers(config, layers), *head(config)]


FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_stacked_experts,
)
