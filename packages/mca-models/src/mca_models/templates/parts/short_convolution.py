"""Rules of gated short convolutions (LFM2), and the names that LFM2 files give to all parts of a layer.

`mca_models.megatron.features.short_convolution` computes these layers.
"""

from collections.abc import Iterable, Iterator

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Field, Fixed, HfConfig, Lens, dense_fields, norm_epsilon
from mca_models.templates.parts.common import attention, inner, renamed
from mca_models.templates.parts.gated_delta_net import fused
from mca_models.templates.parts.layer_costs import LayerSizes, MixerCosts, SavedTensor
from mca_models.weights import ROW, Param, Shard, expand_rules

NO_CONV_BIAS = Fixed("conv_bias", (False,), "no published model has biases")
FIELDS = (
    *norm_epsilon(dense_fields(tied=True), "norm_eps"),
    Field("short_conv_kernel_dim", "conv_L_cache", 3),
)
DEFAULTS: Values = {
    **{"num_key_value_heads": 8, "rope_theta": 1e6, "norm_eps": 1e-5, "pad_token_id": 0},
    "max_position_embeddings": 128_000,
}
MODULES = "module_names"
"""Fact in ``extra``: names are those of transformers' modules, which differ from those of LFM3 files."""
_NAMES = {
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.experts.": "feed_forward.experts.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}


def _read_layer_types(hf: HfConfig) -> JsonObject:
    layers = range(hf["num_hidden_layers"])
    listed = hf.get("full_attn_idxs")
    attended = layers if listed is None else listed
    kinds = hf.get("layer_types") or ["full_attention" if layer in attended else "conv" for layer in layers]
    return {"layer_types": tuple(kinds)}


LAYER_TYPES = Lens(_read_layer_types, lambda values: {"layer_types": list(values["layer_types"] or ())})
"""The type of each layer: ``full_attention`` or ``conv``, listed, or those with attention by ``full_attn_idxs``."""


def mixers(config: McaModelConfig) -> Iterator[Param]:
    """Attention or short convolution of every decoder layer, with the norm before it."""
    cut = {
        "in_proj.weight": fused((config.hidden_size,) * 3),
        "conv1d.weight": Shard(0),
        "out_proj.weight": ROW,
    }
    files = {
        "in_proj.weight": "in_proj.weight",
        "conv1d.weight": "conv.weight",
        "out_proj.weight": "out_proj.weight",
    }
    convolution = [
        inner("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        *(inner(f"self_attention.{name}", f"conv.{files[name]}", shard=shard) for name, shard in cut.items()),
    ]
    if config.norm.norm_placement == "sandwich":
        convolution.append(inner("self_attention.post_layernorm.weight", "post_attention_layernorm.weight"))
    layers = range(config.num_layers)
    yield from expand_rules(convolution, layers=[layer for layer in layers if config.is_conv_layer(layer)])
    yield from expand_rules(
        attention(config), layers=[layer for layer in layers if not config.is_conv_layer(layer)]
    )


def lfm3_names(config: McaModelConfig, rules: Iterable[Param]) -> list[Param]:
    """Return ``rules`` under the names of LFM3 files, or of transformers' modules."""
    names = {name: new for name, new in _NAMES.items() if "self_attn" not in name}
    if config.norm.norm_placement == "sandwich":
        names |= {
            "post_attention_layernorm": "post_operator_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffn_norm",
        }
    if config.extra.get(MODULES):
        names["self_attn.gate_proj"] = "self_attn.g_proj"
    return renamed(rules, names)


def lfm2_names(rules: Iterable[Param]) -> list[Param]:
    """Return ``rules`` under the names of LFM2 files."""
    return renamed(rules, _NAMES)


def _saved_tensors(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of a gated short convolution."""
    channels = sizes.tokens * config.hidden_size / sizes.layout.tp * sizes.width
    net = "mca_models/megatron/features/short_convolution.py: forward"
    return [
        SavedTensor("gates and inputs", 3 * channels, net),
        SavedTensor("convolution: padded, and its output", 2 * channels, net),
        SavedTensor("gated output", channels, net),
    ]


CONVOLUTION_COSTS = MixerCosts(
    _saved_tensors,
    weights=lambda config, sizes: 4 * config.hidden_size**2 / sizes.layout.tp,
    flops=lambda config, sizes: 0.0,
)
