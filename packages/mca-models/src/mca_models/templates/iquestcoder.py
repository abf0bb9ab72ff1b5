"""IQuest-Coder: HF ``LlamaForCausalLM`` under its own ``model_type``."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import Fixed, dense_fields

LLAMA = get_family("llama")

CONFIG = replace(
    LLAMA.table,
    fields=dense_fields(eps=1e-5),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    fixed=(
        *LLAMA.table.fixed,
        Fixed("clip_qkv", (None,), "Megatron does not clip q, k and v"),
        Fixed("use_sliding_window", (False,), "no published model has one"),
    ),
)

FAMILY = replace(LLAMA, model_type="iquestcoder", config=CONFIG)
