"""MiniMax M2: HF ``MiniMaxM2ForCausalLM``: sigmoid routing with a bias, QK-norm over all heads."""

from functools import partial

from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Fixed,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    AUX_LOSS,
    NO_JITTER,
    SIGMOID_ROUTER,
    SIGMOID_ROUTING,
    expert_fields,
    moe_params,
)
from mca_models.templates.parts.names import BLOCK_SPARSE_BIASED


def derive(hf: HfConfig) -> JsonObject:
    """The rotated share of a head, which published files give in channels."""
    rope = read_rope(hf)
    if hf.get("rotary_dim") and rope["rotary_percent"] == 1.0:
        rope["rotary_percent"] = hf["rotary_dim"] / hf["head_dim"]
    return rope


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_local_experts", default=256, ffn="intermediate_size")),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
    constants={"qk_layernorm": True, "qk_layernorm_full_width": True, **SIGMOID_ROUTER},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NO_JITTER,
        Fixed("scoring_func", ("sigmoid",), "MiniMax M2's router"),
        Fixed("use_qk_norm", (True,), "all published models have these norms"),
    ),
    aliases={"num_experts": "num_local_experts"},
    facts=(SIGMOID_ROUTING, Lens(derive), AUX_LOSS),
    partial_rotary=True,
)

FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=BLOCK_SPARSE_BIASED),
    moe=BLOCK_SPARSE_BIASED,
)
