"""Llama 2 and 3: HF ``LlamaForCausalLM``."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, NO_MLP_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=dense_fields(),
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
    ),
)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=CONFIG,
    params=dense_layers,
)
