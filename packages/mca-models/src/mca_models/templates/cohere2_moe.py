"""Command A with experts: HF ``Cohere2MoeForCausalLM``: experts parallel to attention, dense first layers."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, read_rope
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    expert_fields,
    moe_params,
    require_sigmoid_routing,
    write_moe_layers,
    write_shared_experts,
)
from mca_models.templates.parts.multipliers import read_logit_scale
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types

COHERE2 = get_family("cohere2")

NAMES = MoeNames()


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, which have experts, their weights, the norms, and the factor on logits."""
    score = hf.get("expert_selection_fn", "softmax")
    normalised = score == "softmax" or hf.get("norm_topk_prob", True)
    if score == "sigmoid" and normalised:
        require_sigmoid_routing(hf)
    dense, count = hf.get("first_k_dense_replace", 0), hf["num_hidden_layers"]
    steps = [hf.get("prefix_dense_sliding_window_pattern", 1)] * dense
    steps += [hf.get("sliding_window_pattern", 4)] * (count - dense)
    places = [*range(dense), *range(count - dense)]
    kinds = hf.get("layer_types") or [
        SLIDING if (i + 1) % step else FULL for i, step in zip(places, steps, strict=True)
    ]
    listed = hf.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (count - dense)
    sparse = tuple(int(kind == "sparse") for kind in listed)
    forced = hf.get("prefix_dense_sliding_window_pattern", 1) == 1
    plain = zip(kinds, sparse, strict=True)
    return {
        **read_logit_scale(hf),
        **read_rope({**hf, "rope_scaling": None}),  # a key that transformers does not read here
        "layer_types": tuple(kinds),
        "no_rope_freq": tuple(int(kind == FULL and (yes or not forced)) for kind, yes in plain),
        "moe_layer_freq": sparse,
        "moe_router_score_function": score,
        "moe_router_normalised": bool(normalised),
        **_shared(hf),
        **_norms(hf),
        "ffn_hidden_size": hf.get("prefix_dense_intermediate_size") or hf["intermediate_size"],
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    kinds = {**write_layer_types(values), **write_moe_layers(values)}
    dense = {"prefix_dense_intermediate_size": values["ffn_hidden_size"]}
    score = {"expert_selection_fn": values["moe_router_score_function"]}
    parallel = {
        "norm_topk_prob": values["moe_router_normalised"],
        **write_shared_experts(values, "num_shared_experts"),
        "shared_expert_combination_strategy": "average" if values["moe_shared_expert_mean"] else "sum",
    }
    eps, root = values["layernorm_epsilon"], values["normalization"] == "RMSNorm"
    norms = {"rms_norm_eps": eps if root else None} | ({} if root else {"layer_norm_eps": eps})
    return {"logit_scale": 1 / values["logits_scaling"], **kinds, **dense, **score, **parallel, **norms}


def _shared(hf: HfConfig) -> JsonObject:
    count, strategy = hf.get("num_shared_experts", 0), hf.get("shared_expert_combination_strategy", "average")
    if count and strategy not in ("average", "sum"):
        raise HfConfigError(
            f"config.json: 'shared_expert_combination_strategy' is {strategy!r:.80}; supported: 'average', 'sum'"
        )
    return {
        "moe_shared_expert_intermediate_size": count * hf["intermediate_size"] or None,
        "moe_shared_expert_mean": bool(count) and strategy == "average",
    }


def _norms(hf: HfConfig) -> JsonObject:
    eps = hf.get("rms_norm_eps")
    if eps is None:
        return {"layernorm_epsilon": hf.get("layer_norm_eps", 1e-5)}
    return {"layernorm_epsilon": eps, "normalization": "RMSNorm"}


_DERIVED = ("ffn_hidden_size", "layernorm_epsilon")

CONFIG = replace(
    COHERE2.table,
    fields=(
        *(field for field in COHERE2.table.fields if field.mca not in _DERIVED),
        *expert_fields(count="num_experts", default=8, ffn="intermediate_size"),
    ),
    defaults={**COHERE2.table.defaults, "num_experts_per_tok": 2, "head_dim": 128},
    facts=(Lens(derive, write),),
)

FAMILY = replace(
    COHERE2,
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    config=CONFIG,
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
)
