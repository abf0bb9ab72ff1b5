"""Phi 3.5 MoE: HF ``PhimoeForCausalLM``: LayerNorms, SparseMixer routing."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import aux_loss, expert_fields, moe_params, write_aux_loss
from mca_models.templates.parts.names import BLOCK_SPARSE
from mca_models.templates.parts.rope import long_rope

NAMES = replace(
    BLOCK_SPARSE, in_memory=(("block_sparse_moe.gate.", "mlp.router."), ("block_sparse_moe.", "mlp."))
)
_SCALES = ("short_mscale", "long_mscale")


def derive(hf: HfConfig) -> JsonObject:
    """The load-balancing loss and RoPE."""
    if (hf["num_local_experts"] or 0) < 2:
        raise HfConfigError(
            f"config.json: 'num_local_experts' is {hf['num_local_experts']!r:.80}; supported: 2 or more"
        )
    return rope(hf) | aux_loss(hf)


def rope(hf: HfConfig) -> JsonObject:
    """The rope, which has one factor on cosine and sine, and in transformers the short factors at every length."""
    found = long_rope(hf)
    scaling = found["rope_scaling"]
    if scaling is None:
        return found
    short, long = (scaling.pop(name, None) for name in _SCALES)
    if scaling["rope_type"] != "longrope" or short is None or short != long:
        raise HfConfigError(
            f"config.json: RoPE has rope_type {scaling['rope_type']!r}, short_mscale {short!r:.80} and "
            f"long_mscale {long!r:.80}; supported: default, or longrope with both and of the same value"
        )
    scaling |= {"attention_factor": short, "long_factor": scaling.get("short_factor")}
    return found


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    rope = values["rope_scaling"] or {}
    scales = dict.fromkeys(_SCALES, rope["attention_factor"]) if rope else {}
    parameters = {"rope_theta": values["rotary_base"], "rope_type": "default", **rope, **scales}
    return {"rope_parameters": parameters, **write_aux_loss(values)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_local_experts", default=16, ffn="intermediate_size"),
        Field("window_size", "sliding_window", None),
        Field("add_bias_attention", "attention_bias", False),
        Field("output_bias", "lm_head_bias", False),
        Field("sparse_mixer_jitter", "router_jitter_noise", 0.01),
        Field("input_jitter_noise", "input_jitter_noise", 0.0),
    ),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 16},
    constants={"normalization": "LayerNorm", "moe_router_pre_softmax": True},
    fixed=(SILU, Fixed("num_experts_per_tok", (2,), "transformers' router always chooses two")),
    facts=(Lens(derive, write),),
)

FAMILY = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
    unadaptable=frozenset({"router"}),
)
