"""Aria, the text model: HF ``AriaTextForCausalLM``: stacked experts in every layer, shared ones beside them."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.common import renamed
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.moe import TRANSPOSED, moe_params
from mca_models.templates.names import EXPERTS_TURNED, MoeNames
from mca_models.weights import Param

NAMES = MoeNames(router="mlp.router.weight")
FILES = {
    "mlp.experts.gate_up_proj": "mlp.experts.fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.fc2.weight",
}


def derive(hf: HfConfig) -> JsonObject:
    """The shared experts as one wide one."""
    shared = hf["intermediate_size"] * hf.get("moe_num_shared_experts", 2)
    return {"moe_shared_expert_intermediate_size": shared or None}


def restore(config: McaModelConfig) -> HfConfig:
    """See ``ConfigTable.restore``."""
    shared = config.moe_shared_expert_intermediate_size or 0
    return {"moe_num_shared_experts": shared // config.ffn_hidden_size}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        Field("num_moe_experts", "moe_num_experts", lambda hf: hf.get("num_local_experts", 8)),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Field("moe_router_topk", "moe_topk", 2),
    ),
    defaults={"pad_token_id": 2},
    fixed=(SILU, NO_ATTENTION_BIAS, NO_MLP_BIAS),
    derive=derive,
    restore=restore,
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
    found=lambda config, names, shapes: (
        {"fused_experts": True} if any(name.endswith("experts.gate_up_proj") for name in names) else {}
    ),
    fp8_unread=EXPERTS_TURNED,
)
