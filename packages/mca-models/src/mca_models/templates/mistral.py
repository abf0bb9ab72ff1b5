"""Mistral 7B and its successors: HF ``MistralForCausalLM``, Llama's weights with a sliding window."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.llama import ignored_hf, params

CONFIG = ConfigTable(fields=(*dense_fields(), Field("window_size", "sliding_window", None)), fixed=(SILU,))

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=CONFIG,
    params=params,
    ignored_hf=ignored_hf,
)
