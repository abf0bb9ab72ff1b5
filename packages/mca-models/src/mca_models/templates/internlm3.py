"""InternLM 3: HF ``LlamaForCausalLM`` under its own ``model_type``."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import Fixed, dense_fields

LLAMA = get_family("llama")

CONFIG = replace(
    LLAMA.table,
    fields=dense_fields(eps=1e-5),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "pad_token_id": 2},
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    fixed=(
        *LLAMA.table.fixed,
        *(Fixed(key, (False,), "the published models have none") for key in ("qkv_bias", "bias")),
    ),
)

FAMILY = replace(LLAMA, model_type="internlm3", config=CONFIG)
