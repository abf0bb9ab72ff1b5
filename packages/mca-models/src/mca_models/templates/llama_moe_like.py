"""Families with Llama's attention and routed experts, that differ in ``config.json`` and in names."""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    is_moe_layer,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import attention, gated_qkv, in_fp32, renamed
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    SIGMOID_ROUTING,
    SPARSE_LAYERS,
    TRANSPOSED,
    aux_loss,
    detect_stacked_experts,
    expert_fields,
    fuse_shared_experts,
    moe_params,
    require_sigmoid_routing,
    sigmoid_experts,
    write_aux_loss,
    write_groups,
    write_shared_experts,
)
from mca_models.templates.parts.names import TRANSPOSED_EXPERTS, MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import rotated_windows, window, write_window
from mca_models.weights import Param, Shaped

# Arcee Trinity: HF `AfmoeForCausalLM`: gated attention, pre- and post-norms, sigmoid routing with a bias.
_AFMOE_NAMES = MoeNames(router="mlp.router.gate.weight", router_bias="mlp.expert_bias")
_AFMOE_NORMS = {
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _afmoe_derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, which have experts, the shared ones as one wide one, and the factor on embeddings."""
    require_sigmoid_routing(hf)
    count, step = hf["num_hidden_layers"], hf.get("global_attn_every_n_layers", 4)
    kinds = hf.get("layer_types") or [FULL if (i + 1) % step == 0 else SLIDING for i in range(count)]
    return {
        **rotated_windows(kinds),
        "moe_layer_freq": tuple(int(i >= hf.get("num_dense_layers", 1)) for i in range(count)),
        **fuse_shared_experts(hf, "num_shared_experts", 2),
        "embedding_multiplier": hf["hidden_size"] ** 0.5 if hf.get("mup_enabled") else 1.0,
    }


def _afmoe_write(values: Values) -> HfConfig:
    dense = [layer for layer in range(values["num_layers"]) if not is_moe_layer(values, layer)]
    counts = {"num_dense_layers": len(dense), **write_shared_experts(values, "num_shared_experts")}
    return {**counts, "mup_enabled": values["embedding_multiplier"] != 1.0, **write_layer_types(values)}


def _afmoe_params(config: McaModelConfig) -> list[Param]:
    return renamed(moe_params(config, _AFMOE_NAMES, attention(config, gated_qkv(config))), _AFMOE_NORMS)


AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(eps=1e-5),
            *expert_fields(count="num_experts", default=64),
            Field("moe_router_topk_scaling_factor", "route_scale", 1.0),
            Field("window_size", "sliding_window", 1024),
        ),
        defaults={"head_dim": 128, "num_experts_per_tok": 6},
        constants={
            "qk_layernorm": True,
            "attention_output_gate": True,
            "norm_placement": "sandwich",
            **SIGMOID_ROUTER,
        },
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(Lens(_afmoe_derive, _afmoe_write),),
    ),
    params=_afmoe_params,
    moe=_AFMOE_NAMES,
)


# Aria, the text model: HF `AriaTextForCausalLM`: stacked routed experts and shared experts in every layer.
_ARIA_FILES = {
    "mlp.experts.gate_up_proj": "mlp.experts.fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.fc2.weight",
}


def _aria_derive(hf: HfConfig) -> JsonObject:
    return fuse_shared_experts(hf, "moe_num_shared_experts", 2, "intermediate_size")


def _aria_params(config: McaModelConfig) -> list[Param]:
    stacked = replace(config, extra={**config.extra, "fused_experts": True, TRANSPOSED: True})
    rules = moe_params(stacked, MoeNames(router="mlp.router.weight"))
    return rules if config.extra.get("fused_experts") else renamed(rules, _ARIA_FILES)


ARIA = Family(
    model_type="aria_text",
    architecture="AriaTextForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            Field("num_moe_experts", "moe_num_experts", lambda hf: hf.get("num_local_experts", 8)),
            Field("moe_ffn_hidden_size", "intermediate_size"),
            Field("moe_router_topk", "moe_topk", 2),
        ),
        defaults={"pad_token_id": 2},
        fixed=SWIGLU_WITHOUT_BIASES,
        facts=(Lens(_aria_derive, lambda values: write_shared_experts(values, "moe_num_shared_experts")),),
    ),
    params=_aria_params,
    detect_extra=detect_stacked_experts,
    fp8_unsupported=TRANSPOSED_EXPERTS,
)


# dots.llm1: HF `Dots1ForCausalLM`: DeepSeek V3's experts with Qwen 3's attention.
def _dots_derive(hf: HfConfig) -> JsonObject:
    """Experts, and windows in the layers from ``max_window_layers`` on, or as listed."""
    on = hf.get("sliding_window", 4096) is not None
    return sigmoid_experts(hf) | window({"max_window_layers": 62, **hf, "use_sliding_window": on})


def _dots_write(values: Values) -> HfConfig:
    experts = {**write_groups(values), "norm_topk_prob": True}
    return {**experts, "sliding_window": None, **write_window(values)}


DOTS = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *expert_fields(count="n_routed_experts"), SCALED),
        defaults={"norm_topk_prob": False, "num_key_value_heads": 32},
        constants={"qk_layernorm": True, **SIGMOID_ROUTER},
        fixed=(SILU, NO_ATTENTION_BIAS, NORMALISED),
        aliases={"num_local_experts": "n_routed_experts"},
        facts=(Lens(_dots_derive, _dots_write),),
    ),
    params=partial(moe_params, names=MoeNames()),
    moe=MoeNames(),
)


# ERNIE 4.5 with experts: HF `Ernie4_5_MoeForCausalLM`: softmax routing with a bias for the selection only.
_ERNIE_BIAS = "moe_statics.e_score_correction_bias"
_ERNIE_NAMES = MoeNames(
    router_bias=f"mlp.{_ERNIE_BIAS}",
    bias_layout=Shaped((1, -1)),
    in_memory=((f"mlp.{_ERNIE_BIAS}", f"mlp.gate.{_ERNIE_BIAS}"),),
)


def _ernie_derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts, and the shared experts as one wide expert."""
    layers, step = hf["num_hidden_layers"], hf.get("moe_layer_interval", 1)
    last = hf.get("moe_layer_end_index", -1)
    sparse = range(hf.get("moe_layer_start_index", 1), layers if last == -1 else last + 1)
    width = hf["moe_intermediate_size"] * hf.get("moe_num_shared_experts", 2)
    return {
        "moe_layer_freq": tuple(int(i in sparse and (i + 1) % step == 0) for i in range(layers)),
        "moe_shared_expert_intermediate_size": width or None,
        **aux_loss(hf),
    }


def _ernie_write(values: Values) -> HfConfig:
    shared, width = values["moe_shared_expert_intermediate_size"] or 0, values["moe_ffn_hidden_size"] or 1
    sparse = [layer for layer in range(values["num_layers"]) if is_moe_layer(values, layer)]
    ends = {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
    return {"moe_num_shared_experts": shared // width, **ends, **write_aux_loss(values)}


def _ernie_params(config: McaModelConfig) -> list[Param]:
    return in_fp32(moe_params(config, _ERNIE_NAMES), "router.weight")  # as in transformers


ERNIE4_5_MOE = with_mtp_passthrough(
    Family(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        config=ConfigTable(
            fields=(
                *dense_fields(tied=True, eps=1e-5),
                Field("num_moe_experts", "moe_num_experts", 64),
                Field("moe_ffn_hidden_size", "moe_intermediate_size"),
                Field("moe_router_topk", "moe_k", 6),
            ),
            defaults={
                **{"num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5e5, "pad_token_id": 0},
                "moe_intermediate_size": 1536,
            },
            constants={"rotary_interleaved": True, "moe_router_enable_expert_bias": True},
            fixed=(
                SILU,
                Fixed("use_bias", (False, None), "no published model has biases"),
                Fixed("moe_norm_min", (1e-12,), "a bound that no published model meets"),
            ),
            aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
            facts=(Lens(_ernie_derive, _ernie_write),),
        ),
        params=_ernie_params,
        moe=_ERNIE_NAMES,
    )
)


# Flint: HF `FlintForCausalLM`: attention sinks, sigmoid routing; RoPE only in sliding-window layers.
_FLINT_NAMES = MoeNames(shared="mlp.shared_expert.")


def _flint_derive(hf: HfConfig) -> JsonObject:
    last = hf["num_hidden_layers"] - 1
    kinds = [FULL if i < 2 or i % 4 == 1 or i == last else SLIDING for i in range(last + 1)]
    return rotated_windows(hf.get("layer_types") or kinds)


def _flint_params(config: McaModelConfig) -> list[Param]:
    rules = in_fp32(moe_params(config, _FLINT_NAMES), "router.weight", "softmax_offset")  # as in transformers
    return rules if config.extra.get("fused_experts") else renamed(rules, {"sinks": "softmax_offset"})


FLINT = Family(
    model_type="flint",
    architecture="FlintForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            *expert_fields(count="num_experts", default=256),
            Field("window_size", "sliding_window", 513),
            Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", 1024),
        ),
        defaults={
            **{"num_key_value_heads": 4, "head_dim": 128, "mlp_only_layers": [0, 1], "norm_topk_prob": True},
            "router_aux_loss_coef": 0.0005,
        },
        constants={"qk_layernorm": True, "softmax_type": "learnable", "moe_router_score_function": "sigmoid"},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            Fixed("norm_topk_prob", (True,), "Megatron normalizes sigmoid scores"),
        ),
        facts=(SIGMOID_ROUTING, SPARSE_LAYERS, Lens(_flint_derive, write_layer_types)),
    ),
    params=_flint_params,
    moe=_FLINT_NAMES,
)

FAMILIES = by_type(AFMOE, ARIA, DOTS, ERNIE4_5_MOE, FLINT)
