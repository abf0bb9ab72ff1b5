"""Live names of both implementations, and which chunk holds what."""

from dataclasses import replace

import pytest

from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_models.megatron.names import NamingScheme, chunk_params
from mca_models.templates import config_from_hf

TE, LOCAL = NamingScheme("transformer_engine", grouped_experts=True), NamingScheme("local")


@pytest.fixture
def dense() -> McaModelConfig:
    return config_from_hf(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 100,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        }
    )


@pytest.mark.parametrize(
    "canonical,te,local",
    [
        (
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.{layer}.input_layernorm.weight",
        ),
        (
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ),
        (
            "decoder.layers.{layer}.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.{layer}.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.{layer}.self_attention.kv_layernorm.weight",
        ),
        (
            "mtp.layers.{layer}.transformer_layer.mlp.linear_fc1.layer_norm_weight",
            "mtp.layers.{layer}.transformer_layer.mlp.linear_fc1.layer_norm_weight",
            "mtp.layers.{layer}.transformer_layer.pre_mlp_layernorm.weight",
        ),
    ],
)
def test_naming(canonical: str, te: str, local: str) -> None:
    assert TE.live(canonical) == te
    assert LOCAL.live(canonical) == local


def test_the_prediction_layer_is_renamed() -> None:
    naming = replace(LOCAL, mtp_layer="mtp_model_layer")
    assert naming.live("mtp.layers.{layer}.transformer_layer.x") == "mtp.layers.{layer}.mtp_model_layer.x"


def test_layers_are_numbered_from_zero_in_each_chunk(dense: McaModelConfig) -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = replace(dense, layout=layout)
    at = RankGrid(layout, 2).coordinates(1)
    chunk = config.pipeline_plan().chunks[1][1]
    held = chunk_params(config, chunk, layout, at, LOCAL)
    live = {item.live: item.param.mca_name() for item in held}
    assert chunk.layers == (3,)
    assert live["decoder.layers.0.self_attention.linear_qkv.weight"] == (
        "decoder.layers.3.self_attention.linear_qkv.weight"
    )
    assert [item.live for item in held if item.copy] == ["output_layer.weight"]


def test_a_tied_head_beside_its_embedding_is_not_held_twice(dense: McaModelConfig) -> None:
    chunk = dense.pipeline_plan().first
    held = chunk_params(dense, chunk, dense.layout, RankGrid(dense.layout, 1).coordinates(0), LOCAL)
    assert "output_layer.weight" not in {item.live for item in held}
