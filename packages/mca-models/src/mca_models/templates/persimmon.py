"""Persimmon: HF ``PersimmonForCausalLM``: LayerNorms, also as QK-norm, biases, squared ReLU."""

from mca_models.templates.config_table import ConfigTable, Field, Fixed
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import RELU2, RELU2_MLP
from mca_models.templates.parts.legacy import FUSED_FIELDS, equal_heads, fused_params

CONFIG = ConfigTable(
    fields=(*FUSED_FIELDS, Field("qk_layernorm", "qk_layernorm", True)),
    defaults={"partial_rotary_factor": 0.5},
    constants={**RELU2_MLP, "normalization": "LayerNorm", "add_bias_linear": True},
    fixed=(RELU2, Fixed("hidden_dropout", (0.0,), "transformers drops after the MLP only")),
    facts=(Lens(equal_heads),),
    partial_rotary=True,
)


FAMILY = Family(
    model_type="persimmon", architecture="PersimmonForCausalLM", config=CONFIG, params=fused_params
)
