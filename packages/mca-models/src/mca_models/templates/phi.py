"""Phi 1 to 4, and Phi 3.5 with experts."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    ORIGINAL,
    SILU,
    ConfigTable,
    DropoutTogether,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import (
    attention,
    dense_layers,
    dense_mlp,
    embedding,
    fused_mlp,
    fused_qkv,
    head,
    renamed,
)
from mca_models.templates.parts.moe import aux_loss, expert_fields, moe_params, write_aux_loss
from mca_models.templates.parts.names import BLOCK_SPARSE
from mca_models.templates.parts.rope import long_rope
from mca_models.weights import Param, expand_rules

# Phi 1, 1.5, 2: HF `PhiForCausalLM`: parallel attention and MLP after one LayerNorm, biases everywhere.
_PHI_NAMES = {
    **{"o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    **{"up_proj": "fc1", "down_proj": "fc2", "model.norm": "model.final_layernorm"},
}


def _phi_params(config: McaModelConfig) -> list[Param]:
    return renamed(dense_layers(config), _PHI_NAMES)


PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    config=ConfigTable(
        fields=(
            *norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
            Field("hidden_act", "hidden_act", "gelu_new"),
            Field("hidden_dropout", "resid_pdrop", 0.0),
            Field("embedding_dropout", "embd_pdrop", 0.0),
            Field("qk_layernorm", "qk_layernorm", False),
        ),
        defaults={"partial_rotary_factor": 0.5},
        constants={
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "output_bias": True,
            "gated_linear_unit": False,
            "parallel_block": "one_norm",
        },
        fixed=(DropoutTogether("embd_pdrop", "resid_pdrop"),),
        partial_rotary=True,
    ),
    params=_phi_params,
)


# Phi 3 and 4: HF `Phi3ForCausalLM`: q, k, v in one tensor, gate and up too, partial RoPE and longrope.
def _phi3_write(values: Values) -> HfConfig:
    return {ORIGINAL: (values["rope_scaling"] or {}).get(ORIGINAL, 4096)}


def _phi3_params(config: McaModelConfig) -> list[Param]:
    rules = [*attention(config, fused_qkv(config)), *dense_mlp(config, fused_mlp())]
    return [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)]


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(eps=1e-5),
            Field("window_size", "sliding_window", None),
            Field("hidden_dropout", "resid_pdrop", 0.0),
        ),
        defaults={"pad_token_id": 32000, ORIGINAL: 4096},
        fixed=(SILU,),
        facts=(Lens(long_rope, _phi3_write),),
        partial_rotary=True,
    ),
    params=_phi3_params,
)


# Phi 3.5 MoE: HF `PhimoeForCausalLM`: LayerNorms, SparseMixer routing.
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


def _phimoe_write(values: Values) -> HfConfig:
    rope = values["rope_scaling"] or {}
    scales = dict.fromkeys(_SCALES, rope["attention_factor"]) if rope else {}
    parameters = {"rope_theta": values["rotary_base"], "rope_type": "default", **rope, **scales}
    return {"rope_parameters": parameters, **write_aux_loss(values)}


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(eps=1e-5),
            *expert_fields(count="num_local_experts", default=16, ffn="intermediate_size"),
            Field("window_size", "sliding_window", None),
            Field("add_bias_attention", "attention_bias", False),
            Field("output_bias", "lm_head_bias", False),
            Field("sparse_mixer_jitter", "router_jitter_noise", 0.01),
            Field("input_jitter_noise", "input_jitter_noise", 0.0),
        ),
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
        },
        constants={"normalization": "LayerNorm", "moe_router_pre_softmax": True},
        fixed=(SILU, Fixed("num_experts_per_tok", (2,), "transformers' router always chooses two")),
        facts=(Lens(derive, _phimoe_write),),
    ),
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
    unadaptable=frozenset({"router"}),
)

FAMILIES = by_type(PHI, PHI3, PHIMOE)
