"""Qwen 3 with experts: HF ``Qwen3MoeForCausalLM``."""

from functools import partial

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import SPARSE_LAYERS, expert_fields, moe_params
from mca_models.templates.parts.names import MoeNames

NAMES = MoeNames()


def derive(hf: HfConfig) -> dict[str, object]:
    """Derive the sliding window, which all layers have or none."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return {"window_size": window}


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=128)),
    defaults={"num_key_value_heads": 4},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    aliases={"num_experts": "num_local_experts"},
    facts=(SPARSE_LAYERS, Lens(derive)),
)


params = partial(moe_params, names=NAMES)

FAMILY = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=CONFIG, params=params, moe=NAMES
)
