"""Qwen 3, dense: HF ``Qwen3ForCausalLM``, with norms on the heads of q and k."""

from mca_models.templates.config_table import SILU, ConfigTable, Fixed, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.llama import params
from mca_models.templates.qwen2 import window

CONFIG = ConfigTable(
    fields=dense_fields(),
    constants={"qk_layernorm": True},
    fixed=(SILU, Fixed("attention_bias", (False,), "Megatron has no bias on the output projection alone")),
    derive=window,
)

FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", config=CONFIG, params=params)
