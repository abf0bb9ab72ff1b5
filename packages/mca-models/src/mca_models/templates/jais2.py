"""Jais 2: HF ``Jais2ForCausalLM``: LayerNorms, biases everywhere, squared ReLUs."""

from mca_models.templates.config_table import ConfigTable, Fixed, dense_fields, norm_epsilon
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import BOTH, RELU2, RELU2_MLP
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
    constants={**RELU2_MLP, "normalization": "LayerNorm", "add_bias_linear": True},
    fixed=(RELU2, Fixed("attention_bias", (True,), BOTH), Fixed("mlp_bias", (True,), BOTH)),
)

FAMILY = Family(model_type="jais2", architecture="Jais2ForCausalLM", config=CONFIG, params=dense_layers)
