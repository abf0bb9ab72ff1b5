"""FlexOlmo: HF ``FlexOlmoForCausalLM``: OLMo 2's attention and post-norms, OLMoE's experts."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, dense_fields
from mca_models.templates.parts.moe import expert_fields

OLMOE = get_family("olmoe")

CONFIG = replace(
    OLMOE.table,
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=7, ffn="intermediate_size")),
    defaults={
        **{"pad_token_id": 100277, "num_experts_per_tok": 5, "rope_theta": 5e5},
        "router_aux_loss_coef": 0.01,
    },
    constants={**OLMOE.table.constants, "norm_placement": "post"},
    fixed=(SILU, NO_ATTENTION_BIAS),
)

FAMILY = replace(OLMOE, model_type="flex_olmo", architecture="FlexOlmoForCausalLM", config=CONFIG)
