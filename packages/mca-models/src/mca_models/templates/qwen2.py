"""Qwen 2 and 2.5: HF ``Qwen2ForCausalLM``, Llama's weights with biases on q, k and v."""

from mca_models.templates.config_table import SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.sliding_window import window, write_window

CONFIG = ConfigTable(
    fields=dense_fields(),
    constants={"add_qkv_bias": True},
    fixed=(SILU,),
    facts=(Lens(window, write_window),),
)

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=CONFIG,
    params=dense_layers,
)
