"""MiMo 7B and MiMo V2 Flash."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family, by_type, count_mtp_layers
from mca_models.templates.parts.common import attention, dense_layers, dense_mlp, renamed
from mca_models.templates.parts.moe import (
    NORMALISED,
    SIGMOID_ROUTER,
    derive_moe_layers,
    expert_fields,
    grouped_experts,
    moe_params,
    require_sigmoid_routing,
    write_moe_layers,
)
from mca_models.templates.parts.mtp import mtp_params
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import (
    FULL,
    PER_LAYER_TYPE,
    SLIDING,
    require_truncate,
    write_layer_types,
)
from mca_models.weights import Param, SwappedHalves

QWEN2 = get_family("qwen2")


# MiMo 7B: HF `MiMoForCausalLM` (remote code): Qwen 2, with an MTP layer before the final norm.
MTP = "model.mtp_layers."
PREFIX = f"{MTP}{{layer}}."
OWN = {
    "enorm": f"{PREFIX}token_layernorm",
    "hnorm": f"{PREFIX}hidden_layernorm",
    "eh_proj": f"{PREFIX}input_proj",
    "final_layernorm": f"{PREFIX}final_layernorm",
}


def _mimo_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order; ``input_proj`` takes the states before the embedding."""
    mtp = mtp_params(config, [*attention(config), *dense_mlp(config)], OWN, PREFIX)
    swapped = [
        replace(rule, hf_layout=SwappedHalves()) if rule.mca.endswith("eh_proj.weight") else rule
        for rule in mtp
    ]
    return [*dense_layers(config), *swapped]


MIMO = replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    config=replace(
        QWEN2.table,
        fields=(*QWEN2.table.fields, Field("mtp_num_layers", "num_nextn_predict_layers", 0)),
        constants={**QWEN2.table.constants, "mtp_before_final_norm": True},
        fixed=(
            *QWEN2.table.fixed,
            Fixed("num_nextn_predict_layers", (0, 1), "what a second MTP layer takes is not known"),
            Fixed("use_sliding_window", (False,), "no published model has windows"),
        ),
    ),
    params=_mimo_params,
    count_mtp=partial(count_mtp_layers, prefix=MTP),
    in_transformers=False,
)


# MiMo V2 Flash: HF `MiMoV2FlashForCausalLM`: sinks and more keys in sliding-window layers, narrow values.
NAMES = MoeNames()
SHARE = 0.334


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, their heads and ropes, and which have experts."""
    require_sigmoid_routing(hf)
    count = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or [SLIDING if i and (i + 1) % 6 else FULL for i in range(count)]
    ropes = hf.get("rope_parameters") or {}
    full, local = (_rope(ropes.get(kind) or {}, base) for kind, base in ((FULL, 5e6), (SLIDING, 1e4)))
    _require_ropes(full, local, ropes)
    require_truncate(ropes.get(FULL) or {})
    window = hf.get("sliding_window_size")
    experts = grouped_experts({**hf, "first_k_dense_replace": 1}) | derive_moe_layers(hf)
    return {
        **experts,
        **full,
        "rotary_base_local": local["rotary_base"],
        "layer_types": tuple(kinds),
        "window_size": window + 1 if window else hf.get("sliding_window", 129),
        "layer_type_overrides": {
            SLIDING: {"num_query_groups": 2 * hf.get("num_key_value_heads", 4), "softmax_type": "learnable"}
        },
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor") or 1.0,
    }


def _rope(said: HfConfig, base: float) -> JsonObject:
    """Derive one rope; transformers rotates whole heads if a scaled one does not name its share."""
    share = SHARE if said.get("rope_type", "default") == "default" else 1.0
    return read_rope({"rope_theta": base, "partial_rotary_factor": share, "rope_parameters": said})


def _require_ropes(full: Values, local: Values, said: HfConfig) -> None:
    """Reject a rope of windows that differs in more than its base, and a factor on rotated channels alone."""
    if local["rope_scaling"] or local["rotary_percent"] != full["rotary_percent"]:
        raise HfConfigError(
            f"config.json: 'rope_parameters.sliding_attention' is {said[SLIDING]!r:.160}; supported: rope_type "
            f"default, and the partial_rotary_factor of full layers, which is {full['rotary_percent']}"
        )
    scaling = full["rope_scaling"] or {}
    if scaling.get("rope_type") in ("yarn", "longrope") and scaling.get("attention_factor") != 1:
        raise HfConfigError(
            f"config.json: 'rope_parameters.full_attention' is of rope_type {scaling['rope_type']!r}; supported: with "
            "an attention_factor of 1.0, as a part of each head is not rotated"
        )


def _write(values: Values) -> HfConfig:
    shared = {"partial_rotary_factor": values["rotary_percent"], "rope_type": "default"}
    bases = {FULL: values["rotary_base"], SLIDING: values["rotary_base_local"]}
    ropes = {kind: {"rope_theta": base, **shared} for kind, base in bases.items()}
    scale = {"routed_scaling_factor": values["moe_router_topk_scaling_factor"]}
    sizes = {"sliding_window": values["window_size"], "rope_parameters": ropes, **scale}
    groups = {
        "n_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
    }
    return {**sizes, **groups, **write_layer_types(values), **write_moe_layers(values)}


def _v2_params(config: McaModelConfig) -> list[Param]:
    rules = moe_params(config, NAMES)
    return rules if config.extra.get("fused_experts") else renamed(rules, {"sinks": "attention_sink_bias"})


MIMO_V2_FLASH = with_mtp_passthrough(
    Family(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        config=ConfigTable(
            fields=(
                *dense_fields(eps=1e-5),
                *expert_fields(count="n_routed_experts", default=256),
                Field("value_channels", "v_head_dim", 128),
                Field("value_scale", "attention_value_scale", 1.0),
            ),
            defaults={"num_key_value_heads": 4, "head_dim": 192, "attention_value_scale": 0.707},
            constants=SIGMOID_ROUTER,
            fixed=(SILU, NO_ATTENTION_BIAS, NORMALISED, PER_LAYER_TYPE),
            aliases={"num_local_experts": "n_routed_experts"},
            facts=(Lens(derive, _write),),
            partial_rotary=True,
        ),
        params=_v2_params,
        moe=NAMES,
    )
)

FAMILIES = by_type(MIMO, MIMO_V2_FLASH)
