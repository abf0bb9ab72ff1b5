"""Gemma 4, the text model: HF ``Gemma4ForCausalLM``: wider heads in full-attention layers, which may have K = V.

In E2B and E4B each layer has per-layer embeddings; late layers share the keys and values of earlier ones.
"""

import logging
from collections.abc import Collection, Mapping

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject, Typed, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import GELU, GELU_ONLY
from mca_models.templates.parts.common import (
    MLP,
    attention,
    dense_layers,
    down,
    embedding,
    gate_up,
    head,
    in_layers,
    inner,
)
from mca_models.templates.parts.gemma4_images import BIDIRECTIONAL, bidirectional_images
from mca_models.templates.parts.names import HF, HF_ATTN, HF_MLP
from mca_models.templates.parts.rope import FULL, PER_LAYER_TYPE, SLIDING, write_layer_types
from mca_models.templates.shapes import Shape
from mca_models.weights import COLUMN, GATED, ROW, Param, Stage, expand_rules

logger = logging.getLogger(__name__)
ROWS = 262_144
"""Tokens with embeddings for all layers, where ``config.json`` does not say it."""
NORMS = {
    "dense_layernorm": "pre_feedforward_layernorm",
    "dense_post_layernorm": "post_feedforward_layernorm_1",
    "experts_layernorm": "pre_feedforward_layernorm_2",
    "experts_post_layernorm": "post_feedforward_layernorm_2",
    "post_layernorm": "post_feedforward_layernorm",
}
"""Norms of an MLP and of the experts parallel to it."""
EXPERTS = [
    Param(
        mca=f"{MLP}experts.linear_fc{number}.weight{{expert}}",
        hf=(f"{HF}experts.{name}",),
        shard=shard,
        stacked=True,
    )
    for number, name, shard in ((1, "gate_up_proj", GATED), (2, "down_proj", ROW))
]
PER_LAYER = [
    inner("per_layer_gate.weight", "per_layer_input_gate.weight"),
    inner("per_layer_projection.weight", "per_layer_projection.weight"),
    inner("per_layer_layernorm.weight", "post_per_layer_input_norm.weight"),
]
"""Rules of per-layer embeddings."""
PER_LAYER_TABLES = [
    Param(
        mca="embedding.per_layer_embeddings.weight",
        hf=("model.embed_tokens_per_layer.weight",),
        shard=COLUMN,
        stage=Stage.FIRST,
        vocab=True,
    ),
    Param(
        mca="embedding.per_layer_projection.weight",
        hf=("model.per_layer_model_projection.weight",),
        stage=Stage.FIRST,
    ),
    Param(
        mca="embedding.per_layer_layernorm.weight",
        hf=("model.per_layer_projection_norm.weight",),
        stage=Stage.FIRST,
    ),
]
"""Parameters that all layers share."""


class _Size(Field):
    """A size that ``null`` does not stand for."""

    def read(self, hf: Values) -> Typed:
        """Read the value, as `Field.read`."""
        value = hf.get(self.hf, self.default)
        if type(value) is not int:
            raise HfConfigError(
                f"config.json: '{self.hf}' is {value!r:.80}; supported: a number, 0 for none (transformers takes "
                f"nothing else); left out it is {self.default}"
            )
        return value


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, their heads and ropes, and the scale of embeddings."""
    rows, vocabulary = hf.get("vocab_size_per_layer_input", ROWS), hf["vocab_size"]
    if hf.get("hidden_size_per_layer_input") and rows != vocabulary:
        raise HfConfigError(
            f"config.json: 'vocab_size_per_layer_input' is {rows!r:.80}; supported: the vocab_size {vocabulary} "
            "(each token has embeddings for all layers)"
        )
    count = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    kinds = [*kinds[:-1], FULL]  # transformers has the last one see everything
    ropes = hf.get("rope_parameters") or {}
    full, local = ropes.get(FULL) or {}, ropes.get(SLIDING) or {}
    share = full.get("partial_rotary_factor", 1.0 if full else 0.25)
    turning = {"rope_type": "proportional", "partial_rotary_factor": share}
    Fixed("rope_type", ("proportional",), "RoPE of full layers").check(full)
    Fixed("rope_type", ("default",), "RoPE of sliding-window layers").check(local)
    shared = bool(hf.get("attention_k_eq_v"))
    groups = hf.get("num_global_key_value_heads") if shared else None
    own = {"kv_channels": hf.get("global_head_dim", 512), "values_are_keys": shared}
    own |= {"num_query_groups": groups or hf.get("num_key_value_heads", 4)}
    if "per_layer_config" in hf:  # transformers then asks for no global sizes, and writes what differs alone
        by_layer = hf["per_layer_config"] or {}
        overrides = (its for layer, its in by_layer.items() if kinds[int(layer)] == FULL)
        said: JsonObject = next(overrides, {})
        own |= {"kv_channels": said.get("head_dim", hf.get("head_dim", 256))}
        own |= {"num_query_groups": said.get("num_key_value_heads", hf.get("num_key_value_heads", 4))}
    return {
        **_experts(hf),
        "layer_types": tuple(kinds),
        "layer_type_overrides": {FULL: own},
        "rotary_base": float(full.get("rope_theta", 1e6)),
        "rotary_base_local": float(local.get("rope_theta", 1e4)),
        "rope_scaling": {**turning, **({"factor": full["factor"]} if "factor" in full else {})},
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
    }


def _experts(hf: HfConfig) -> JsonObject:
    """26B A4B: experts parallel to the MLP."""
    if not hf.get("enable_moe_block"):
        return {}
    Fixed(
        "use_double_wide_mlp", (False, None), "no published model has experts and MLPs of two widths"
    ).check(hf)
    return {
        **{"num_moe_experts": hf["num_experts"], "moe_ffn_hidden_size": hf["moe_intermediate_size"]},
        **{"moe_router_topk": hf["top_k_experts"], "moe_parallel_dense_mlp": True},
        "moe_shared_expert_intermediate_size": hf["intermediate_size"],
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    own = (values["layer_type_overrides"] or {})[FULL]
    full = {"rope_theta": values["rotary_base"], **(values["rope_scaling"] or {})}
    local = {"rope_theta": values["rotary_base_local"], "rope_type": "default"}
    sizes = {"global_head_dim": own["kv_channels"], "num_global_key_value_heads": own["num_query_groups"]}
    shared = {
        "attention_k_eq_v": own["values_are_keys"],
        "hidden_activation": GELU,
        **write_layer_types(values),
    }
    experts = {
        "num_experts": values["num_moe_experts"],
        "moe_intermediate_size": values["moe_ffn_hidden_size"],
    }
    if values["moe_parallel_dense_mlp"]:
        shared |= {**experts, "top_k_experts": values["moe_router_topk"], "enable_moe_block": True}
    return {**shared, **sizes, "rope_parameters": {FULL: full, SLIDING: local}}


FIELDS = (
    *dense_fields(tied=True),
    Field("window_size", "sliding_window", 512),
    Field("final_logit_softcapping", "final_logit_softcapping", None),
    Field("num_kv_shared_layers", "num_kv_shared_layers", 0),
    Field("double_wide_mlp", "use_double_wide_mlp", False),
)
CONFIG = ConfigTable(
    fields=(
        Field("vocab_size", "vocab_size_per_layer_input", ROWS),  # which `derive` compares with the other one
        _Size("per_layer_input_size", "hidden_size_per_layer_input", 256),
        *FIELDS,
    ),
    defaults={"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
    constants={
        **{"hidden_act": GELU, "norm_placement": "sandwich", "qk_layernorm": True},
        **{"softmax_scale": 1.0, "value_norm": True, "layer_scalar": True},
    },
    fixed=(
        NO_ATTENTION_BIAS,
        GELU_ONLY,
        PER_LAYER_TYPE,
        Fixed(BIDIRECTIONAL, (None, "vision"), "Megatron's decoder is causal"),
    ),
    facts=(Lens(derive, write), bidirectional_images(None)),
)


def parallel_experts(config: McaModelConfig) -> list[Param]:
    """Return the rules of a layer's MLP and of the parallel router."""
    mlp, norms = f"{MLP}shared_experts.", NORMS.items()
    return [
        gate_up(mlp, HF_MLP),
        down(mlp, HF_MLP),
        *(inner(f"mlp.{mca}.weight", f"{hf}.weight") for mca, hf in norms),
        inner("mlp.router.weight", "router.proj.weight"),
        inner("mlp.router_scale", "router.scale"),
        inner("mlp.expert_scale", "router.per_expert_scale"),
    ]


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = range(config.num_layers)
    scalars = [
        inner("layer_scalar", "layer_scalar"),
        *(PER_LAYER if config.per_layer_embedding is not None else []),
    ]
    rules = [
        *(PER_LAYER_TABLES if config.per_layer_embedding is not None else []),
        *expand_rules(scalars, layers=layers),
    ]
    if config.moe is None:
        return [*dense_layers(config), *rules]
    blocks = in_layers(config, lambda own: [*attention(own), *parallel_experts(own)])
    stacked = expand_rules(EXPERTS, layers=layers, experts=range(config.num_experts))
    return [embedding(), *blocks, *stacked, *rules, *head(config)]


def unused_keys(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """The projections and norms of keys and values in layers that take another's, which transformers passes over."""
    takers = [layer for layer in range(config.num_layers) if config.kv_source_layer(layer) is not None]
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    known = {f"{HF_ATTN}{part}.weight".format(layer=layer) for layer in takers for part in parts}
    left = sorted(known.intersection(names))
    if left:
        logger.warning(
            "not read or exported: %s of keys and values (%s, ...), whose layers use those of earlier layers",
            counted(len(left), "tensor"),
            left[0],
        )
    return {"hf_left_behind": left} if left else {}


def left_behind(config: McaModelConfig) -> frozenset[str]:
    """Return the tensors that ``unused_keys`` detected."""
    return frozenset(config.extra.get("hf_left_behind", ()))


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    config=CONFIG,
    params=params,
    ignored_hf=left_behind,
    detect_extra=unused_keys,
)
