"""Rules of models that mix gated attention with linear attention layers (gated delta net).

`mca_models.megatron.features` computes these layers.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates.config_table import Field, HfConfig, Lens
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import ATTN, attention, inner
from mca_models.templates.parts.layer_costs import CHUNK, SINGLE, LayerSizes, MixerCosts, SavedTensor, norm
from mca_models.templates.parts.names import HF
from mca_models.templates.parts.vision_tower import Spelling
from mca_models.templates.shapes import Shape
from mca_models.weights import COLUMN, ROW, Concat, Param, Shard, expand_rules

_DECAY_BLOCK = 16
"""Tokens of a chunk that are processed pairwise with per-channel decay."""
DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
CONSTANTS = {"qk_layernorm": True, "attention_output_gate": True, "layernorm_zero_centered_gamma": True}
FIELDS = (
    Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    Field("linear_num_key_heads", "linear_num_key_heads", 16),
    Field("linear_num_value_heads", "linear_num_value_heads", 32),
    Field("linear_key_head_dim", "linear_key_head_dim", 128),
    Field("linear_value_head_dim", "linear_value_head_dim", 128),
)


def mixed_layers(hf: HfConfig) -> JsonObject:
    """Derive the layers with linear attention: all but every fourth, unless listed."""
    step = hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % step else "full_attention" for i in range(hf["num_hidden_layers"])
    ]
    return {"layer_types": tuple(kinds)}


def write_layers(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"layer_types": list(values["layer_types"] or ())}


def segments(config: FamilyConfig) -> tuple[int, int, int, int, int, int]:
    """Rows of the input projection's parts: q, k, v, z (output gate), b (beta), a (decay)."""
    key = config.linear_attention.linear_num_key_heads * config.linear_attention.linear_key_head_dim
    value = config.linear_attention.linear_num_value_heads * config.linear_attention.linear_value_head_dim
    heads = config.linear_attention.linear_num_value_heads
    return key, key, value, value, heads, heads


def fused(sizes: Sequence[int]) -> Shard:
    """A column cut of parts that lie one after the other."""
    unit = gcd(*sizes)
    return Shard(0, segments=tuple(size // unit for size in sizes))


def delta_net(config: McaModelConfig, in_proj: Param) -> list[Param]:
    """Linear attention with the norm before it; ``in_proj`` says how HF splits the input projection."""
    sizes = segments(config)
    return [
        inner("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        replace(in_proj, mca=f"{ATTN}in_proj.weight", shard=fused(sizes)),
        inner("self_attention.conv1d.weight", "linear_attn.conv1d.weight", shard=fused(sizes[:3])),
        inner("self_attention.dt_bias", "linear_attn.dt_bias", shard=COLUMN),
        inner("self_attention.A_log", "linear_attn.A_log", shard=COLUMN),
        inner("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        inner("self_attention.out_proj.weight", "linear_attn.out_proj.weight", shard=ROW),
    ]


def mixed_attention(config: McaModelConfig, in_proj: Param) -> Iterator[Param]:
    """The attention of every decoder layer, linear or gated."""
    layers = range(config.num_layers)
    linear = [layer for layer in layers if config.is_linear_layer(layer)]
    yield from expand_rules(delta_net(config, in_proj), layers=linear)
    yield from expand_rules(attention(config), layers=[layer for layer in layers if layer not in linear])


MTP_PREFIX = "mtp.layers.{layer}."
MTP_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "final_layernorm": "mtp.norm",
}


def detect_mtp_layers(config: McaModelConfig, names: Collection[str]) -> int:
    """Return the number of MTP layers of a checkpoint: ``config.json`` need not count them."""
    return int("mtp.fc.weight" in names)


PREFIX = "model.language_model."
"""Prefix of names where transformers saved the text part of a larger model."""


PREFIX_KEY = "hf_prefix"
"""The fact in ``extra`` that they do."""


def detect_prefix(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Detect whether the names have the prefix of a vision-language checkpoint."""
    return {PREFIX_KEY: PREFIX} if any(name.startswith(PREFIX) for name in names) else {}


def prefixed(config: McaModelConfig, params: list[Param]) -> list[Param]:
    """``params`` under the names that the checkpoint has."""
    if not config.extra.get(PREFIX_KEY):
        return params
    spelled = Spelling(PREFIX, "lm_head.", {}).text_to_file
    return [replace(param, hf=tuple(map(spelled, param.hf))) for param in params]


def in_proj(config: McaModelConfig) -> Param:
    """The input projection: HF has q, k, v in one tensor."""
    q, k, v, *others = delta.segments(config)
    names = tuple(f"{HF}linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return Param(mca="", hf=names, layout=Concat((q + k + v, *others)))


MIXED_LAYERS = Lens(mixed_layers, write_layers)


def _saved_tensors(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of a gated delta net: a chunked fp32 recurrence with keys per value head."""
    tp, tokens, width = sizes.layout.tp, sizes.tokens, sizes.width
    key, value = (
        given(config.linear_attention).linear_key_head_dim,
        given(config.linear_attention).linear_value_head_dim,
    )
    heads = given(config.linear_attention).linear_num_value_heads / tp
    projected = 2 * given(config.linear_attention).linear_num_key_heads * key / tp
    keys, values = heads * key, heads * value
    rule = "mca_models/megatron/features/delta_rule.py: gated_delta_rule"
    pairs = (
        _DECAY_BLOCK * key if given(config.linear_attention).linear_channel_decay else 0
    )  # per-channel decay
    net = "mca_models/megatron/features/gated_delta_net.py: _sequence"
    return [
        SavedTensor("convolution: padded, and its output", tokens * (projected + values) * 2 * width, net),
        SavedTensor("queries and keys in fp32", tokens * projected * SINGLE, net),
        SavedTensor("gate, activated, and output", tokens * values * (2 * SINGLE + 2 * width), net),
        *norm(tokens, values, sizes, output=False),
        SavedTensor("queries, keys and values of chunks", tokens * (2 * keys + values) * SINGLE, rule),
        SavedTensor(
            "token-by-token matrices of a chunk", tokens * heads * (CHUNK * 6 + 3 * pairs) * SINGLE, rule
        ),
        SavedTensor("solved, and corrections", tokens * (keys + 2 * values) * SINGLE, rule),
        SavedTensor("decayed queries and keys", tokens * 2 * keys * SINGLE, rule),
        SavedTensor("states", tokens / CHUNK * keys * value * SINGLE, rule),
    ]


def _weights(config: McaModelConfig, sizes: LayerSizes) -> float:
    linear = given(config.linear_attention)
    heads, key, value = (
        linear.linear_num_value_heads,
        linear.linear_key_head_dim,
        linear.linear_value_head_dim,
    )
    projected = 2 * linear.linear_num_key_heads * key + 3 * heads * value + 2 * heads
    if linear.linear_channel_decay and not linear.linear_low_rank_gates:
        projected += heads * (key - 1)  # the decay of each channel in place of one of a head
    return config.hidden_size * projected / sizes.layout.tp


def _flops(config: McaModelConfig, sizes: LayerSizes) -> float:
    linear = given(config.linear_attention)
    key, value = linear.linear_key_head_dim, linear.linear_value_head_dim
    each = CHUNK * (3 * key + 2 * value) + 3 * key * value  # token-by-token matrices of a chunk, and states
    return 2 * sizes.tokens * linear.linear_num_value_heads * each / sizes.layout.tp


DELTA_NET_COSTS = MixerCosts(_saved_tensors, _weights, _flops)
