"""Nemotron 3 and 4, Minitron: HF ``NemotronForCausalLM``: zero-centred LayerNorms, squared ReLUs, partial rope."""

from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    ConfigTable,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import RELU2, RELU2_MLP
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=norm_epsilon(dense_fields(eps=1e-5), "norm_eps"),
    defaults={"partial_rotary_factor": 0.5, "initializer_range": 0.0134},
    constants={**RELU2_MLP, "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True},
    fixed=(RELU2, NO_ATTENTION_BIAS, NO_MLP_BIAS),
    partial_rotary=True,
)

FAMILY = Family(model_type="nemotron", architecture="NemotronForCausalLM", config=CONFIG, params=dense_layers)
