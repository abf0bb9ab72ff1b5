"""Facts of a model that follow from several fields, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import McaModelConfig
from mca_config.model_config import training_dtype

SIZES: dict[str, Any] = {
    **{"model_type": "qwen3", "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 9},
    **{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "max_position_embeddings": 64},
}
MAMBA = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 4, "mamba_num_groups": 1, "mamba_state_dim": 4},
    "mamba_conv_kernel_dim": 4,
}
MLA = {"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
MOE = {"num_moe_experts": 3, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
TWO_KINDS = {"layer_types": (FULL, SLIDING) * 2, "window_size": 8}
NORMED = {
    "normed_residual": True,
    **{"attention_residual_factors": (1.0,) * 4, "attention_output_factors": (1.0,) * 4},
}
PLAIN = {
    **{"has_custom_norms": False, "has_custom_qkv": False, "has_parallel_mamba": False},
    **{"attention_biases": False, "rotated_channels": 16, "num_experts": 0, "mtp_num_layers": 0},
    **{"vision_fields": None, "per_layer_input_size": 0, "accepts_keys": False, "padded_vocab_size": 9},
}


def model(**more: Any) -> McaModelConfig:
    return McaModelConfig.from_fields(**SIZES | more)


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({}, {}),
        ({"normalization": "LayerNorm"}, {}),
        ({"norm_bias": False}, {}),
        ({"normalization": "LayerNorm", "norm_bias": False}, {"has_custom_norms": True}),
        ({"norm_weight": False}, {"has_custom_norms": True}),
        ({"parallel_block": "one_norm"}, {"has_custom_norms": True}),
        ({"parallel_block": "two_norms"}, {"has_custom_norms": True}),
        (NORMED, {"has_custom_norms": True}),
        (MAMBA, {}),
        ({**MAMBA, "mamba_parallel_attention": True}, {"has_custom_norms": True, "has_parallel_mamba": True}),
        ({"values_are_keys": True}, {"has_custom_qkv": True}),
        ({"value_norm": True}, {"has_custom_qkv": True}),
        ({"value_scale": 2.0}, {"has_custom_qkv": True}),
        ({"head_gate": True}, {"has_custom_qkv": True}),
        ({"value_channels": 8}, {"has_custom_qkv": True}),
        ({"value_channels": 16}, {}),
        ({"num_kv_shared_layers": 2}, {"has_custom_qkv": True}),
        ({**TWO_KINDS, "layer_type_overrides": {SLIDING: {"norm_placement": "sandwich"}}}, {}),
        (
            {**TWO_KINDS, "layer_type_overrides": {FULL: {}, SLIDING: {"num_query_groups": 4}}},
            {"has_custom_qkv": True},
        ),
        ({"add_bias_linear": True}, {"attention_biases": True}),
        ({"add_bias_linear": True, "add_bias_attention": False}, {}),
        ({"add_bias_attention": True}, {"attention_biases": True}),
        ({"rotary_percent": 0.5}, {"rotated_channels": 8}),
        ({**MLA, "rotary_percent": 0.5}, {"rotated_channels": 8}),
        (MOE, {"num_experts": 3}),
        ({"mtp_num_layers": 2}, {"mtp_num_layers": 2}),
        ({"per_layer_input_size": 5}, {"per_layer_input_size": 5}),
    ],
)
def test_facts_that_follow_from_fields(fields: dict[str, Any], facts: dict[str, Any]) -> None:
    found = model(**fields)
    assert {name: getattr(found, name) for name in PLAIN} == PLAIN | facts


def test_layers_differ_by_their_type_and_by_the_keys_that_they_take() -> None:
    assert model().kinds() == [model()]
    assert len(model(**TWO_KINDS).kinds()) == 1
    changed = model(**TWO_KINDS, layer_type_overrides={SLIDING: {"kv_channels": 32}})
    assert [kind.attention.kv_channels for kind in changed.kinds()] == [16, 32]
    assert [changed.layer_config(layer).attention.kv_channels for layer in range(4)] == [16, 32, 16, 32]
    shared = model(**TWO_KINDS, num_kv_shared_layers=1)
    assert [kind.accepts_keys for kind in shared.kinds()] == [False, False, True]
    both = model(**TWO_KINDS, num_kv_shared_layers=2, layer_type_overrides={SLIDING: {"kv_channels": 32}})
    assert [(kind.attention.kv_channels, kind.accepts_keys) for kind in both.kinds()] == [
        *((16, False), (32, False), (16, True), (32, True)),
    ]
    assert [both.layer_config(layer).mlp.ffn_hidden_size for layer in range(4)] == [128] * 4


@pytest.mark.parametrize("single", [False, True])
def test_layers_have_attention_or_an_mlp_or_both(single: bool) -> None:
    kinds = (
        "full_attention",
        "linear_attention",
        "lightning",
        "mamba",
        "selective_scan",
        "conv",
        "mlp",
        "moe",
    )
    own: Any = SimpleNamespace(block=SimpleNamespace(single_blocks=single), layer_types=kinds)
    own._kind = lambda layer: McaModelConfig._kind(own, layer)
    own.has_attention = lambda layer: McaModelConfig.has_attention(own, layer)
    layers = range(len(kinds))
    assert [McaModelConfig.has_attention(own, n) for n in layers] == [True] * 6 + [not single] * 2
    assert [McaModelConfig.has_mlp(own, n) for n in layers] == [not single] * 6 + [True] * 2
    assert [McaModelConfig.has_mixer(own, n) for n in layers] == [False, *[True] * 5, False, False]
    named = {
        "linear_attention": McaModelConfig.is_linear_layer,
        "lightning": McaModelConfig.is_lightning_layer,
        "mamba": McaModelConfig.is_mamba_layer,
        "selective_scan": McaModelConfig.is_scan_layer,
        "conv": McaModelConfig.is_conv_layer,
    }
    for name, is_layer in named.items():
        assert [is_layer(own, n) for n in layers] == [kind == name for kind in kinds]
    own.layer_types = None
    assert McaModelConfig.has_attention(own, 0) and not McaModelConfig.has_mixer(own, 0)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({}, "float16"),
        ({"bf16": False, "fp16": False}, "float16"),
        ({"bf16": True}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"bf16": True, "fp16": True}, "bfloat16"),
    ],
)
def test_arguments_choose_the_dtype_of_training(arguments: dict[str, bool], dtype: str) -> None:
    assert training_dtype(model(dtype="float16"), SimpleNamespace(**arguments)) == dtype
    assert training_dtype(model(), SimpleNamespace(fp16=True)) == "float16"
