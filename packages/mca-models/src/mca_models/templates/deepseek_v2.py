"""DeepSeek V2: HF ``DeepseekV2ForCausalLM``: MLA, experts chosen by softmax."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Fixed,
    HfConfig,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.mla import MLA, MLA_FIELDS, mla_moe_params
from mca_models.templates.parts.names import MoeNames

GREEDY, LIMITED = "greedy", "group_limited_greedy"


def read_groups(hf: HfConfig) -> JsonObject:
    """Groups count only if named, and by their best expert."""
    if hf["topk_method"] == GREEDY:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return {"moe_router_group_score": "max"}


def write_groups(values: Values) -> HfConfig:
    """Write the routing method."""
    return {"topk_method": LIMITED if values["moe_router_num_groups"] else GREEDY}


CONFIG = ConfigTable(
    fields=MLA_FIELDS,
    defaults={"topk_method": GREEDY, "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": 1536},
    constants={"qk_layernorm": True, "moe_router_pre_softmax": True},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        Fixed("topk_method", (GREEDY, LIMITED), "DeepSeek V2's router"),
        Fixed("scoring_func", ("softmax",), "DeepSeek V2's router"),
        Fixed("norm_topk_prob", (False,), "transformers ignores it, other programs do not"),
        Fixed("moe_layer_freq", (1,), "every layer after the first dense ones has experts"),
    ),
    aliases={"num_experts": "n_routed_experts"},
    facts=(MLA, Lens(read_groups, write_groups)),
)

FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=CONFIG,
    params=mla_moe_params,
    moe=MoeNames(),
)
