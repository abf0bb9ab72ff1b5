"""Aria, the text model: HF ``AriaTextForCausalLM``: stacked routed experts and shared experts in every layer."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import SWIGLU_WITHOUT_BIASES, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import renamed
from mca_models.templates.parts.moe import TRANSPOSED, detect_stacked_experts, moe_params, shared_experts_lens
from mca_models.templates.parts.names import TRANSPOSED_EXPERTS, MoeNames
from mca_models.weights import Param

NAMES = MoeNames(router="mlp.router.weight")
SHARED = "moe_num_shared_experts"
FILES = {
    "mlp.experts.gate_up_proj": "mlp.experts.fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.fc2.weight",
}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        Field("num_moe_experts", "moe_num_experts", lambda hf: hf.get("num_local_experts", 8)),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Field("moe_router_topk", "moe_topk", 2),
    ),
    defaults={"pad_token_id": 2},
    fixed=SWIGLU_WITHOUT_BIASES,
    facts=(shared_experts_lens(SHARED, 2, "intermediate_size"),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = moe_params(
        replace(config, extra={**config.extra, "fused_experts": True, TRANSPOSED: True}), NAMES
    )
    return rules if config.extra.get("fused_experts") else renamed(rules, FILES)


FAMILY = Family(
    model_type="aria_text",
    architecture="AriaTextForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_stacked_experts,
    fp8_unsupported=TRANSPOSED_EXPERTS,
)
