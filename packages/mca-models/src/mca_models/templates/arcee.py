"""Arcee AFM: HF ``ArceeForCausalLM``: Llama with an MLP of squared ReLUs, without a gate."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, NO_MLP_BIAS, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import RELU2, RELU2_MLP
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    constants=RELU2_MLP,
    fixed=(RELU2, NO_ATTENTION_BIAS, NO_MLP_BIAS),
)

FAMILY = Family(model_type="arcee", architecture="ArceeForCausalLM", config=CONFIG, params=dense_layers)
