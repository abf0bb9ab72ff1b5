"""OLMoE: HF ``OlmoeForCausalLM``: experts in every layer, norms over all heads of q and of k."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.moe import expert_fields
from mca_models.templates.qwen3_moe import NAMES, params, restore_sparse, sparse_layers

CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_experts", default=64, ffn="intermediate_size"),
        Field("clip_qkv", "clip_qkv", None),
    ),
    defaults={"pad_token_id": 1},
    constants={"qk_layernorm": True, "qk_layernorm_full_width": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    derive=sparse_layers,
    restore=restore_sparse,
)

FAMILY = Family(model_type="olmoe", architecture="OlmoeForCausalLM", config=CONFIG, params=params, moe=NAMES)
