"""Granite 3 and 4, and HyperCLOVA X: Llama's layers with factors on embeddings, residuals and logits."""

from collections.abc import Sequence
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    HfConfig,
    Lens,
    dense_fields,
    head_dim,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import attention, dense_layers, embedding, head, inner, renamed
from mca_models.templates.parts.mamba import (
    BAMBA,
    PLAIN_STEPS,
    bamba_fields,
    derive_bamba,
    layer_types_from_hf,
    layer_types_to_hf,
    mixed_layers,
    write_bamba,
)
from mca_models.templates.parts.moe import (
    AUX_LOSS,
    aux_loss,
    detect_stacked_experts,
    expert_fields,
    write_aux_loss,
)
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import WINDOW
from mca_models.weights import GATED, ROW, Param, expand_rules

FACTORS = (
    Field("embedding_multiplier", "embedding_multiplier", 1.0),
    Field("softmax_scale", "attention_multiplier", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    Field("logits_scaling", "logits_scaling", 1.0),
)


# Granite 3: HF `GraniteForCausalLM`: Llama's weights with scaled embeddings, residuals and logits.
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    config=ConfigTable(fields=(*dense_fields(), *FACTORS), fixed=SWIGLU_WITHOUT_BIASES),
    params=dense_layers,
)


BLOCK = "block_sparse_moe."
FILES = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
MEMORY = ("router.weight", "experts.gate_up_proj", "experts.down_proj")


def shared_mlp(config: McaModelConfig) -> list[Param]:
    """Shared expert of every layer, in addition to the routed ones."""
    if not given(config.moe).moe_shared_expert_intermediate_size:
        return []
    return [
        inner("mlp.shared_experts.linear_fc1.weight", "shared_mlp.input_linear.weight", shard=GATED),
        inner("mlp.shared_experts.linear_fc2.weight", "shared_mlp.output_linear.weight", shard=ROW),
    ]


def expert_layers(config: McaModelConfig, layers: Sequence[int]) -> list[Param]:
    """Experts, router and shared expert of ``layers``, with the norm before them."""
    router, fc1, fc2 = (BLOCK + name for name in (MEMORY if config.extra.get("fused_experts") else FILES))
    experts = [
        inner("mlp.experts.linear_fc1.weight{expert}", fc1, shard=GATED, stacked=True),
        inner("mlp.experts.linear_fc2.weight{expert}", fc2, shard=ROW, stacked=True),
    ]
    rules = [
        inner("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        inner("mlp.router.weight", router),
        *shared_mlp(config),
    ]
    own = expand_rules(experts, layers=layers, experts=range(given(config.moe).num_moe_experts or 0))
    return [*expand_rules(rules, layers=layers), *own]


# Granite 3 with experts: HF `GraniteMoeForCausalLM`: stacked experts, Granite's factors.
def _moe_params(config: McaModelConfig) -> list[Param]:
    layers = range(config.num_layers)
    before = expand_rules(attention(config), layers=layers)
    return [embedding(), *before, *expert_layers(config, layers), *head(config)]


GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    config=ConfigTable(
        fields=(
            *GRANITE.table.fields,
            *expert_fields(count="num_local_experts", default=8, ffn="intermediate_size"),
        ),
        defaults={"num_experts_per_tok": 2},
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(AUX_LOSS,),
    ),
    params=_moe_params,
    detect_extra=detect_stacked_experts,
)


# Granite 3 with experts and a shared one: HF `GraniteMoeSharedForCausalLM`.
def _shared_derive(hf: HfConfig) -> JsonObject:
    """The width of the shared expert, of which there may be none, and the load-balancing loss."""
    return {"moe_shared_expert_intermediate_size": hf.get("shared_intermediate_size") or None, **aux_loss(hf)}


def _shared_write(values: Values) -> HfConfig:
    return {
        "shared_intermediate_size": values["moe_shared_expert_intermediate_size"] or 0,
        **write_aux_loss(values),
    }


GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    config=replace(GRANITEMOE.table, facts=(Lens(_shared_derive, _shared_write),)),
)


# Granite with windows: HF `GraniteSWAForCausalLM`: attention sinks in all layers, NoPE in some layers.
def _swa_derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, and the ropes: one base, or one for each kind; 0 is no rope."""
    count, rope = hf["num_hidden_layers"], read_rope(hf)
    base = rope["rotary_base"]
    kinds = hf.get("layer_types") or [SLIDING if i % 4 else FULL for i in range(count)]
    thetas = hf.get("layer_rope_theta") or [base] * count
    by_kind = {kind: _bases(thetas, kinds, kind) or [base] for kind in (FULL, SLIDING)}
    full, sliding = (by_kind[kind][0] for kind in (FULL, SLIDING))
    if any(len(bases) > 1 for bases in by_kind.values()) or (rope["rope_scaling"] and full != sliding):
        raise HfConfigError(
            f"config.json: 'layer_rope_theta' is {thetas!r:.80}; supported: one base for full layers, one for "
            "those with a window, both without scaling; 0 for NoPE layers"
        )
    return {
        "layer_types": tuple(kinds),
        "rotary_base": full,
        "rotary_base_local": sliding if sliding != full else None,
        "no_rope_freq": None if all(thetas) else tuple(int(not theta) for theta in thetas),
    }


def _bases(thetas: Sequence[float], kinds: Sequence[str], kind: str) -> list[float]:
    return sorted({float(theta) for theta, its in zip(thetas, kinds, strict=True) if theta and its == kind})


def _swa_write(values: Values) -> HfConfig:
    local = values["rotary_base_local"] or values["rotary_base"]
    bases = [local if kind == SLIDING else values["rotary_base"] for kind in values["layer_types"] or ()]
    skips = values["no_rope_freq"] or (0,) * values["num_layers"]
    thetas = [0 if skip else base for base, skip in zip(bases, skips, strict=True)]
    return {"layer_rope_theta": thetas, **write_layer_types(values)}


GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    config=replace(
        GRANITE.table,
        fields=(*GRANITE.table.fields, WINDOW),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 4},
        constants={"softmax_type": "learnable"},
        facts=(Lens(_swa_derive, _swa_write),),
    ),
)


# Granite with experts and windows: HF `GraniteMoeSWAForCausalLM`.
GRANITEMOE_SWA = replace(
    GRANITEMOE,
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    config=replace(
        GRANITEMOE.table,
        fields=(*GRANITEMOE.table.fields, WINDOW),
        constants=GRANITE_SWA.table.constants,
        facts=(*GRANITEMOESHARED.table.facts, *GRANITE_SWA.table.facts),
    ),
)


# Granite 4: HF `GraniteMoeHybridForCausalLM`: Granite with Mamba 2 layers, and MLPs or experts with a shared one.
def _hybrid_derive(hf: HfConfig) -> JsonObject:
    """Derive the type of each layer, whether positions are rotated, and the experts."""
    layers = hf["num_hidden_layers"]
    kinds = layer_types_from_hf(hf.get("layer_types") or hf.get("layers_block_type") or ["mamba"] * layers)
    values = {
        **{"layer_types": kinds, **derive_bamba(hf)},
        "no_rope_freq": None if hf.get("position_embedding_type") == "rope" else (1,) * layers,
    }
    experts, shared = hf["num_local_experts"] or None, hf["shared_intermediate_size"]
    if experts is None:
        return {**values, "ffn_hidden_size": shared}
    inside = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
    }
    return {**values, **inside, **aux_loss(hf)}


def _hybrid_write(values: Values) -> HfConfig:
    dense = values["num_moe_experts"] is None
    return {
        **{"layer_types": layer_types_to_hf(values), **write_bamba(values), **write_aux_loss(values)},
        "num_local_experts": values["num_moe_experts"] or 0,
        "shared_intermediate_size": values["ffn_hidden_size"]
        if dense
        else values["moe_shared_expert_intermediate_size"],
        "position_embedding_type": None if values["no_rope_freq"] else "rope",
    }


def _hybrid_params(config: McaModelConfig) -> list[Param]:
    layers = range(config.num_layers)
    dense = [
        inner("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        inner("mlp.linear_fc1.weight", "shared_mlp.input_linear.weight", shard=GATED),
        inner("mlp.linear_fc2.weight", "shared_mlp.output_linear.weight", shard=ROW),
    ]
    after = expert_layers(config, layers) if config.num_experts else expand_rules(dense, layers=layers)
    return [embedding(), *mixed_layers(config), *after, *head(config)]


GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    config=ConfigTable(
        fields=(*GRANITE.table.fields, Field("moe_router_topk", "num_experts_per_tok"), *bamba_fields()),
        defaults={
            **{**BAMBA, "num_experts_per_tok": 2},
            **{"num_local_experts": 8, "shared_intermediate_size": 1024},
        },
        fixed=(SILU, NO_ATTENTION_BIAS, PLAIN_STEPS),
        aliases={"layers_block_type": "layer_types"},
        facts=(Lens(_hybrid_derive, _hybrid_write),),
    ),
    params=_hybrid_params,
    detect_extra=detect_stacked_experts,
)


# HyperCLOVA X: HF `HyperCLOVAXForCausalLM`: Granite with post-norms, and a factor on logits.
SANDWICH = {
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


def _clova_derive(hf: HfConfig) -> JsonObject:
    """Norms, and the factor on logits, by which this family multiplies."""
    placement = "sandwich" if hf.get("use_post_norm", True) else "pre"
    return {"norm_placement": placement, "logits_scaling": 1 / hf.get("logits_scaling", 1.0)}


def _clova_write(values: Values) -> HfConfig:
    return {
        "use_post_norm": values["norm_placement"] == "sandwich",
        "logits_scaling": 1 / values["logits_scaling"],
    }


def _clova_params(config: McaModelConfig) -> list[Param]:
    rules = dense_layers(config)
    return renamed(rules, SANDWICH) if config.norm.norm_placement == "sandwich" else rules


OTHERS = ("softmax_scale", "logits_scaling")
HYPERCLOVAX = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in GRANITE.table.fields if field.mca not in OTHERS),
            Field(
                "softmax_scale",
                "attention_multiplier",
                lambda hf: (hf.get("head_dim") or head_dim(hf)) ** -0.5,
            ),
        ),
        fixed=GRANITE.table.fixed,
        facts=(Lens(_clova_derive, _clova_write),),
    ),
    params=_clova_params,
)

FAMILIES = by_type(
    GRANITE, GRANITEMOE, GRANITEMOESHARED, GRANITE_SWA, GRANITEMOE_SWA, GRANITEMOEHYBRID, HYPERCLOVAX
)
