"""OLMo 1 to 3, OLMoE, FlexOlmo and OLMo Hybrid."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, dense_layers, dense_mlp, embedding, head, renamed
from mca_models.templates.parts.moe import expert_fields, moe_params, sparse_layers, write_sparse
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import derive_dual_rope, layer_types, write_dual_rope
from mca_models.templates.shapes import Shape
from mca_models.weights import Concat, Param, expand_rules

# OLMo: HF `OlmoForCausalLM`: LayerNorms without weights; q, k and v may be clipped.
OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in dense_fields() if field.mca != "layernorm_epsilon"),
            Field("clip_qkv", "clip_qkv", None),
        ),
        defaults={"pad_token_id": 1},
        constants={"normalization": "LayerNorm", "norm_weight": False, "layernorm_epsilon": 1e-5},
        fixed=(SILU, NO_ATTENTION_BIAS),
    ),
    params=dense_layers,
)

# OLMo 2: HF `Olmo2ForCausalLM`: post-norms, and over all heads of q and of k.
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(eps=1e-5),
        defaults={"pad_token_id": 1},
        constants={"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_full_width": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
    ),
    params=dense_layers,
)


# OLMo 3: HF `Olmo3ForCausalLM`: OLMo 2's layers; three of four have a window and unscaled RoPE.
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
        defaults={"sliding_window": 4096, "pad_token_id": 1},
        constants=OLMO2.table.constants,
        fixed=OLMO2.table.fixed,
        facts=(
            layer_types(lambda layer: layer % 4 == 3),
            Lens(lambda hf: derive_dual_rope(hf, hf.get("rope_theta", 5e5), 5e5), write_dual_rope),
        ),
    ),
    params=dense_layers,
)


# OLMoE: HF `OlmoeForCausalLM`: experts in every layer, QK-norm over all heads.
def _olmoe_derive(hf: HfConfig) -> JsonObject:
    """Derive the router weights of experts, which all layers have, and the load-balancing loss."""
    return sparse_layers({**hf, "decoder_sparse_step": 1, "mlp_only_layers": []})


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(eps=1e-5),
            *expert_fields(count="num_experts", default=64, ffn="intermediate_size"),
            Field("clip_qkv", "clip_qkv", None),
        ),
        defaults={"pad_token_id": 1, "router_aux_loss_coef": 0.01},
        constants={"qk_layernorm": True, "qk_layernorm_full_width": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
        aliases={"num_local_experts": "num_experts"},
        facts=(Lens(_olmoe_derive, write_sparse),),
    ),
    params=partial(moe_params, names=MoeNames()),
    moe=MoeNames(),
)


# FlexOlmo: HF `FlexOlmoForCausalLM`: OLMo 2's attention and post-norms, OLMoE's experts.
FLEX_OLMO = replace(
    OLMOE,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    config=replace(
        OLMOE.table,
        fields=(*dense_fields(), *expert_fields(count="num_experts", default=7, ffn="intermediate_size")),
        defaults={
            **{"pad_token_id": 100277, "num_experts_per_tok": 5, "rope_theta": 5e5},
            "router_aux_loss_coef": 0.01,
        },
        constants={**OLMOE.table.constants, "norm_placement": "post"},
        fixed=(SILU, NO_ATTENTION_BIAS),
    ),
)


# OLMo Hybrid: HF `OlmoHybridForCausalLM`: gated delta net and OLMo 3's attention, with other norm positions.
FULL, LINEAR, CONV = "full_attention", "linear_attention", "linear_attn.{}_conv1d.weight"
PUBLISHED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Names in files of the norms before linear attention and the MLP after it."""
SAVED = {"post_attention_layernorm": "feedforward_layer_norm"}
"""Name of a norm in the other layers, in transformers and in files."""
DEFAULTS = {
    "linear_num_key_heads": lambda hf: hf["num_attention_heads"],
    "linear_num_value_heads": lambda hf: hf["num_attention_heads"],
    "linear_key_head_dim": lambda hf: _key_channels(hf),
    "linear_value_head_dim": lambda hf: 2 * (hf.get("linear_key_head_dim") or _key_channels(hf)),
}


def _key_channels(hf: HfConfig) -> int:
    return int(0.75 * hf["hidden_size"] / (hf.get("linear_num_key_heads") or hf["num_attention_heads"]))


def _hybrid_derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, whether corrections may be doubled, and whether anything rotates."""
    count, rope = hf["num_hidden_layers"], hf.get("rope_parameters") or {}
    kinds = hf.get("layer_types") or [FULL if i % 4 == 3 else LINEAR for i in range(count)]
    kinds = [FULL if kind == "attention" else kind for kind in kinds]  # transformers' older name
    kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    still = rope.get("rope_theta", hf.get("rope_theta", 1.0)) is None
    return {
        "layer_types": tuple(kinds),
        "no_rope_freq": (1,) * count if still else None,
        "linear_beta_factor": 2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
    }


def _write(values: Values) -> HfConfig:
    kinds = {**delta.write_layers(values), "linear_allow_neg_eigval": values["linear_beta_factor"] == 2.0}
    none = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return {**kinds, **(none if values["no_rope_freq"] else {})}


SAVED_BY_HF = "hf_saved_by_transformers"


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether transformers wrote the files.

    It renames a norm, and cuts convolutions in three that are alike.
    """
    full = next(layer for layer in range(config.num_layers) if not config.is_linear_layer(layer))
    saved = f"model.layers.{full}.feedforward_layer_norm.weight" in names
    return {SAVED_BY_HF: True} if saved else {}


def delta_net(config: McaModelConfig) -> list[Param]:
    """Linear attention, whose projections HF has one by one, and its convolution in three parts."""
    names = tuple(f"{HF}linear_attn.{part}_proj.weight" for part in "qkvgba")
    in_proj = Param(mca="", hf=names, layout=Concat(delta.segments(config)))
    rows = delta.segments(config)[:3]
    if config.extra.get(SAVED_BY_HF):
        third = -(-sum(rows) // 3)
        rows = (third, third, sum(rows) - 2 * third)
    parts = tuple(HF + CONV.format(part) for part in "qkv")
    rules = renamed(delta.delta_net(config, in_proj), {"attn.norm": "attn.o_norm", "out_proj": "o_proj"})
    return [replace(rule, hf=parts, layout=Concat(rows)) if "conv1d" in rule.mca else rule for rule in rules]


def layer_rules(config: McaModelConfig, layer: int) -> list[Param]:
    """The rules of one layer."""
    own = config.layer_config(layer)
    if config.is_linear_layer(layer):
        return renamed([*delta_net(own), *dense_mlp(own)], PUBLISHED)
    rules = [*attention(own), *dense_mlp(own)]
    return renamed(rules, SAVED) if config.extra.get(SAVED_BY_HF) else rules


def _params(config: McaModelConfig) -> list[Param]:
    layers = (expand_rules(layer_rules(config, layer), layers=[layer]) for layer in range(config.num_layers))
    return [embedding(), *chain.from_iterable(layers), *head(config)]


OLMO_HYBRID = with_mtp_passthrough(
    Family(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        config=ConfigTable(
            fields=(
                *dense_fields(),
                *(replace(its, default=DEFAULTS.get(its.hf, 4)) for its in delta.FIELDS),
            ),
            defaults={"pad_token_id": 100277},
            constants={
                **{"qk_layernorm": True, "qk_layernorm_full_width": True, "linear_norm_epsilon": 1e-5},
                "layer_type_overrides": {FULL: {"norm_placement": "post"}},
            },
            fixed=OLMO2.table.fixed,
            facts=(Lens(_hybrid_derive, _write),),
        ),
        params=_params,
        detect_extra=detect_extra,
    )
)

FAMILIES = by_type(OLMO, OLMO2, OLMO3, OLMOE, FLEX_OLMO, OLMO_HYBRID)
