"""Seed-OSS: HF ``SeedOssForCausalLM``, Llama's weights with biases on q, k and v."""

from mca_models.templates.config_table import NO_MLP_BIAS, SILU, ConfigTable, Field, Fixed, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        Field("add_qkv_bias", "attention_bias", True),
        Field("hidden_dropout", "residual_dropout", 0.1),
    ),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_dropout": 0.1, "pad_token_id": 1},
    fixed=(
        SILU,
        Fixed("attention_out_bias", (False,), "Megatron has no bias on the output projection alone"),
        NO_MLP_BIAS,
    ),
)

FAMILY = Family(model_type="seed_oss", architecture="SeedOssForCausalLM", config=CONFIG, params=dense_layers)
