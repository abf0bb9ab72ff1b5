"""Mistral 7B and its successors: HF ``MistralForCausalLM``, Llama's weights with a sliding window."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=(*dense_fields(), Field("window_size", "sliding_window", None)),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    fixed=(SILU,),
)

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=CONFIG,
    params=dense_layers,
)
