"""Values that families derive from other keys of config.json, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_config.pipeline import pipeline_plan
from mca_models.templates import FAMILIES
from mca_models.templates.live_names import is_in_chunk
from mca_models.templates.parts import gated_delta_net, moe, sliding_window
from mca_models.weights import Stage

F, S, C, L = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


MIMO = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def family(kind: str, place: int = -1) -> Any:
    """Return what reads the facts of a family that are at ``place`` in its table."""
    return FAMILIES[kind].table.facts[place].read


WIDTH = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "afmoe without keys": (
        family("afmoe"),
        {"num_hidden_layers": 5, "hidden_size": 16, **WIDTH},
        {
            "layer_types": (S, S, S, F, S),
            "no_rope_freq": (0, 0, 0, 1, 0),
            "moe_layer_freq": (0, 1, 1, 1, 1),
            "moe_shared_expert_intermediate_size": 48,
            "embedding_multiplier": 1.0,
        },
    ),
    "afmoe": (
        family("afmoe"),
        {
            **{"num_hidden_layers": 3, "hidden_size": 16, **WIDTH, "global_attn_every_n_layers": 2},
            **{"num_dense_layers": 2, "num_shared_experts": 3, "mup_enabled": True},
        },
        {
            "layer_types": (S, F, S),
            "moe_layer_freq": (0, 0, 1),
            "moe_shared_expert_intermediate_size": 72,
            "embedding_multiplier": 4.0,
        },
    ),
    "cwm": (
        family("cwm"),
        {"num_hidden_layers": 5},
        {"window_size": 8192, "layer_types": (F, S, S, S, F), "rotary_base": 1e6},
    ),
    "cwm without a window": (
        family("cwm"),
        {"num_hidden_layers": 5, "sliding_window": 0},
        {"window_size": None, "layer_types": None},
    ),
    "ernie": (
        family("ernie4_5_moe"),
        {"num_hidden_layers": 4, **WIDTH},
        {"moe_layer_freq": (0, 1, 1, 1), "moe_shared_expert_intermediate_size": 48},
    ),
    "ernie with every second layer to the fourth": (
        family("ernie4_5_moe"),
        {
            **{"num_hidden_layers": 7, **WIDTH, "moe_layer_interval": 2, "moe_layer_end_index": 3},
            **{"moe_layer_start_index": 1, "moe_num_shared_experts": 0},
        },
        {"moe_layer_freq": (0, 1, 0, 1, 0, 0, 0), "moe_shared_expert_intermediate_size": None},
    ),
    "gpt_neox": (
        family("gpt_neox"),
        {"num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 64},
        {"rotary_base": 1e4, "rotary_percent": 0.25, "parallel_block": "two_norms"},
    ),
    "gpt_neox in sequence": (
        family("gpt_neox"),
        {
            **{"num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 64},
            **{"rotary_emb_base": 500, "rotary_pct": 0.5, "use_parallel_residual": False},
        },
        {"rotary_base": 500, "rotary_percent": 0.5, "parallel_block": "none"},
    ),
    "hyperclovax": (family("hyperclovax"), {}, {"norm_placement": "sandwich", "logits_scaling": 1.0}),
    "hyperclovax with a factor": (
        family("hyperclovax"),
        {"use_post_norm": False, "logits_scaling": 4.0},
        {"norm_placement": "pre", "logits_scaling": 0.25},
    ),
    "lfm2": (family("lfm2"), {"intermediate_size": 1000}, {"ffn_hidden_size": 768}),
    "lfm2 with a factor": (
        family("lfm2"),
        {"intermediate_size": 1000, "block_multiple_of": 10, "block_ffn_dim_multiplier": 1.5},
        {"ffn_hidden_size": 1000},  # 666 * 1.5 = 999
    ),
    "lfm2 without a multiple": (
        family("lfm2"),
        {"intermediate_size": 1000, "block_ffn_dim_multiplier": None},
        {"ffn_hidden_size": 666},
    ),
    "lfm2 as written": (
        family("lfm2"),
        {"intermediate_size": 1000, "block_auto_adjust_ff_dim": False},
        {"ffn_hidden_size": 1000},
    ),
    "lfm2_moe": (family("lfm2_moe"), {"num_hidden_layers": 4}, {"moe_layer_freq": (0, 0, 1, 1)}),
    "llama4": (
        family("llama4_text"),
        {"num_hidden_layers": 5},
        {
            "no_rope_freq": (0, 0, 0, 1, 0),
            "layer_types": (C, C, C, F, C),
            "moe_layer_freq": (1, 1, 1, 1, 1),
            "attn_temperature": {"beta": 0.1, "length": 8192, "first": 1},
            "qk_layernorm": True,
            "qk_layernorm_after_rope": True,
        },
    ),
    "llama4 with steps": (
        family("llama4_text"),
        {
            **{"num_hidden_layers": 5, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3},
            **{"attn_temperature_tuning": False, "use_qk_norm": False},
        },
        {
            "no_rope_freq": (0, 0, 1, 0, 0),
            "layer_types": (C, C, F, C, C),
            "moe_layer_freq": (0, 1, 0, 1, 0),
            "attn_temperature": None,
            "qk_layernorm": False,
        },
    ),
    "longcat": (
        family("longcat_flash"),
        {
            **{"num_layers": 3, "hidden_size": 36, "q_lora_rank": 9, "kv_lora_rank": 4},
            **{"qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "ffn_hidden_size": 7},
        },
        {
            "num_layers": 6,
            "moe_layer_freq": (1, 0, 1, 0, 1, 0),
            "kv_channels": 7,
            "moe_shared_expert_intermediate_size": 7,
            "query_multiplier": 2.0,
            "latent_multiplier": 3.0,
        },
    ),
    "smollm3": (
        family("smollm3"),
        {"num_hidden_layers": 5},
        {"no_rope_freq": (0, 0, 0, 1, 0), "window_size": None, "layer_types": None},
    ),
    "smollm3 with windows": (
        family("smollm3"),
        {
            **{"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True},
            "sliding_window": 9,
        },
        {"no_rope_freq": (0, 1, 0), "window_size": 9, "layer_types": (F, S, F)},
    ),
    "qwen2_moe": (
        family("qwen2_moe"),
        {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
        {"window_size": 4096, "layer_types": (S, F, F, F)},
    ),
    "qwen3_moe": (family("qwen3_moe"), {"sliding_window": 8}, {"window_size": None}),
    "qwen3_moe with windows": (
        family("qwen3_moe"),
        {"use_sliding_window": True},
        {"window_size": 4096},
    ),
    "lists of a delta net": (
        gated_delta_net.mixed_layers,
        {"num_hidden_layers": 5},
        {"layer_types": (L, L, L, F, L)},
    ),
    "scales of gemma": (
        family("gemma2"),
        {"hidden_size": 49},
        {"softmax_scale": 1 / 16, "embedding_multiplier": 7.0},
    ),
    "the scale of cohere": (family("cohere"), {}, {"logits_scaling": 16.0}),
    "windows by a pattern": (
        sliding_window.derive_rotated_windows,
        {"num_hidden_layers": 5, "sliding_window": 7, "sliding_window_pattern": "LLG"},
        {"window_size": 7, "layer_types": (S, S, F, S, S), "no_rope_freq": (0, 0, 1, 0, 0)},
    ),
    "windows by a step": (
        sliding_window.derive_rotated_windows,
        {"num_hidden_layers": 5, "sliding_window": 7},
        {"layer_types": (S, S, S, F, S)},
    ),
    "no rotated windows": (
        sliding_window.derive_rotated_windows,
        {"num_hidden_layers": 5},
        {"window_size": None, "layer_types": None, "no_rope_freq": None},
    ),
    "windows of late layers": (
        sliding_window.window,
        {"num_hidden_layers": 30, "use_sliding_window": True},
        {"window_size": 4096, "layer_types": (F,) * 28 + (S,) * 2},
    ),
    "grouped experts without keys": (
        moe.grouped_experts,
        {"num_hidden_layers": 2, **WIDTH},
        {
            "moe_layer_freq": (1, 1),
            "moe_shared_expert_intermediate_size": None,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "mtp_num_layers": 0,
        },
    ),
    "grouped experts": (
        moe.grouped_experts,
        {
            **{"num_hidden_layers": 3, **WIDTH, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
            **{"n_shared_experts": 2, "num_nextn_predict_layers": 1},
        },
        {
            "moe_layer_freq": (0, 1, 1),
            "moe_shared_expert_intermediate_size": 48,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "mtp_num_layers": 1,
        },
    ),
    "one group of experts": (
        moe.grouped_experts,
        {"num_hidden_layers": 1, **WIDTH, "n_group": 1, "topk_group": 1},
        {"moe_router_num_groups": None, "moe_router_group_topk": None},
    ),
    "sparse layers": (
        moe.sparse_layers,
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True},
        {"moe_layer_freq": (0, 1, 0, 0, 0), "moe_router_pre_softmax": False, "moe_aux_loss_coeff": 0.0},
    ),
    "sparse layers without keys": (
        moe.sparse_layers,
        {"num_hidden_layers": 2, "output_router_logits": True},
        {
            "moe_layer_freq": (1, 1),
            "moe_router_pre_softmax": True,
            "moe_aux_loss_coeff": 0.001,
            "moe_router_load_balancing_type": "aux_loss",
        },
    ),
    "cohere2_moe without keys": (
        family("cohere2_moe"),
        {"num_hidden_layers": 4, "intermediate_size": 24},
        {
            "layer_types": (S, S, S, F),
            "no_rope_freq": (0, 0, 0, 1),
            "moe_layer_freq": (1, 1, 1, 1),
            "moe_router_score_function": "softmax",
            "moe_router_normalised": True,
            "moe_shared_expert_intermediate_size": None,
            "moe_shared_expert_mean": False,
            "layernorm_epsilon": 1e-5,
            "ffn_hidden_size": 24,
        },
    ),
    "cohere2_moe": (
        family("cohere2_moe"),
        {
            **{"num_hidden_layers": 5, "intermediate_size": 24, "first_k_dense_replace": 3},
            **{"prefix_dense_sliding_window_pattern": 2, "sliding_window_pattern": 2},
            **{"prefix_dense_intermediate_size": 32, "num_shared_experts": 2, "rms_norm_eps": 1e-6},
            **{"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        },
        {
            "layer_types": (S, F, S, S, F),
            "no_rope_freq": (0, 1, 0, 0, 1),
            "moe_layer_freq": (0, 0, 0, 1, 1),
            "moe_router_score_function": "sigmoid",
            "moe_router_normalised": False,
            "moe_shared_expert_intermediate_size": 48,
            "moe_shared_expert_mean": True,
            "layernorm_epsilon": 1e-6,
            "normalization": "RMSNorm",
            "ffn_hidden_size": 32,
        },
    ),
    "cohere2_moe with dense layers of full attention": (
        family("cohere2_moe"),
        {
            **{"num_hidden_layers": 4, "intermediate_size": 24, "first_k_dense_replace": 2},
            **{"norm_topk_prob": False, "sliding_window_pattern": 2, "layer_norm_eps": 1e-4},
            **{"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
        },
        {
            "layer_types": (F, F, S, F),
            "no_rope_freq": (0, 0, 0, 1),
            "moe_router_normalised": True,
            "moe_shared_expert_intermediate_size": 24,
            "moe_shared_expert_mean": False,
            "layernorm_epsilon": 1e-4,
        },
    ),
    "minimax_m2 with rotated channels": (
        family("minimax_m2", 1),
        {"rotary_dim": 64, "head_dim": 128, "rope_theta": 5e6},
        {"rotary_percent": 0.5, "rotary_base": 5e6},
    ),
    "minimax_m2 with a rotated share": (
        family("minimax_m2", 1),
        {"rotary_dim": 64, "head_dim": 256, "rope_parameters": {"partial_rotary_factor": 0.75}},
        {"rotary_percent": 0.75},
    ),
    "mimo_v2_flash counts the query too": (
        family("mimo_v2_flash"),
        {**MIMO, "sliding_window_size": 7, "sliding_window": 3},
        {"window_size": 8},
    ),
    "mimo_v2_flash without that number": (
        family("mimo_v2_flash"),
        {**MIMO, "sliding_window": 3},
        {"window_size": 3},
    ),
    "minimax_m2 without either": (family("minimax_m2", 1), {"head_dim": 128}, {"rotary_percent": 1.0}),
    "layers with experts behind the first": (
        moe.derive_moe_layers,
        {"num_hidden_layers": 3},
        {"moe_layer_freq": (0, 1, 1)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_value_follows_from_other_keys(case: str) -> None:
    derive, hf, expected = CASES[case]
    found = derive(hf)
    assert {name: found[name] for name in expected} == expected


def test_experts_without_computation_have_matrices_that_nobody_reads() -> None:
    """Every second of four layers has experts: two with weights, and three that return their input."""
    config = SimpleNamespace(num_experts=2, num_layers=4, moe=SimpleNamespace(moe_identity_experts=3))
    assert FAMILIES["longcat_flash"].ignored_hf(config) == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
        for layer in (0, 1)
        for expert in (2, 3, 4)
        for part in ("gate_proj", "up_proj")
    }


def test_norms_behind_dense_layers_are_ignored() -> None:
    config = SimpleNamespace(num_layers=3, is_moe_layer=lambda layer: layer == 1)
    assert FAMILIES["axk1"].ignored_hf(config) == {
        f"model.layers.{layer}.post_mlp_layernorm.weight" for layer in (0, 2)
    }


@pytest.mark.parametrize(
    ("stage", "layer", "places"),
    [
        (Stage.FIRST, None, {0}),
        (Stage.VISION, None, {0}),
        (Stage.LAYER, 0, {0}),
        (Stage.LAYER, 2, {1}),
        (Stage.NORM, None, {1}),
        (Stage.MTP, 0, {2}),
        (Stage.LAST, None, {2}),
    ],
)
def test_a_parameter_is_in_the_chunk_of_its_stage(stage: Stage, layer: int | None, places: set[int]) -> None:
    """Embedding and layers 0 and 1; layers 2 and 3; an MTP layer and the loss."""
    layout = ParallelLayout(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Ett|tt|mL")
    config: Any = SimpleNamespace(num_layers=4, mtp_num_layers=1)
    param: Any = SimpleNamespace(stage=stage, layer=layer)
    chunks = [*pipeline_plan(layout, 4, 1)]
    assert {number for number, chunk in enumerate(chunks) if is_in_chunk(param, config, chunk)} == places
    if stage is Stage.NORM:
        config.mtp_num_layers = 0
        assert [is_in_chunk(param, config, chunk) for chunk in chunks] == [False, False, True]
