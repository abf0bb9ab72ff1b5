"""DeepSeek V2: HF ``DeepseekV2ForCausalLM``: latent attention, experts chosen by softmax."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Fixed,
    HfConfig,
)
from mca_models.templates.deepseek_v3 import MLA_FIELDS, NAMES, mla, params, restore_groups
from mca_models.templates.family import Family

GREEDY, LIMITED = "greedy", "group_limited_greedy"


def derive(hf: HfConfig) -> JsonObject:
    """Derive as DeepSeek V3, but groups count only if named, and by their best expert."""
    if hf["topk_method"] == GREEDY:
        return mla({**hf, "n_group": 1})
    return {**mla(hf), "moe_router_group_score": "max"}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    method = LIMITED if given(config.moe).moe_router_num_groups else GREEDY
    return {**restore_groups(config), "topk_method": method}


CONFIG = ConfigTable(
    fields=MLA_FIELDS,
    defaults={
        "topk_method": GREEDY,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
    },
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
    derive=derive,
    restore=restore,
)

FAMILY = Family(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", config=CONFIG, params=params, moe=NAMES
)
