"""Seed-OSS: HF ``SeedOssForCausalLM``, Llama's weights with biases on q, k and v."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.llama import params

CONFIG = ConfigTable(
    fields=(*dense_fields(), Field("add_qkv_bias", "attention_bias", True)),
    fixed=(
        SILU,
        Fixed("attention_out_bias", (False,), "Megatron has no bias on the output projection alone"),
        Fixed("mlp_bias", (False,), "Megatron has no bias on the MLP alone"),
    ),
)

FAMILY = Family(model_type="seed_oss", architecture="SeedOssForCausalLM", config=CONFIG, params=params)
