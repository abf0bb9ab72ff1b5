"""dots.llm1: HF ``Dots1ForCausalLM``: DeepSeek V3's experts with Qwen 3's attention."""

from functools import partial

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    expert_fields,
    moe_params,
    sigmoid_experts,
    write_groups,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.sliding_window import window, write_window

NAMES = MoeNames()


def derive(hf: HfConfig) -> JsonObject:
    """Experts, and windows in the layers from ``max_window_layers`` on, or as listed."""
    on = hf.get("sliding_window", 4096) is not None
    return sigmoid_experts(hf) | window({"max_window_layers": 62, **hf, "use_sliding_window": on})


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    experts = {**write_groups(values), "norm_topk_prob": True}
    return {**experts, "sliding_window": None, **write_window(values)}


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="n_routed_experts"), SCALED),
    defaults={"norm_topk_prob": False, "num_key_value_heads": 32},
    constants={"qk_layernorm": True, **SIGMOID_ROUTER},
    fixed=(SILU, NO_ATTENTION_BIAS, NORMALISED),
    aliases={"num_local_experts": "n_routed_experts"},
    facts=(Lens(derive, write),),
)

FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
)
