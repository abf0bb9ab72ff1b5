"""``additional_configs`` takes those settings of Megatron's of which it is known what they do to a run."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from mca_config import DistributingParallelArguments, McaError, _megatron_keys
from mca_config.arguments import _additional

KNOWN = _megatron_keys.COMMON | _megatron_keys.ONLY_0_16 | _megatron_keys.ONLY_0_19
ARGUMENTS = frozenset(DistributingParallelArguments.__dataclass_fields__)
MEANINGS = """
    layernorm_epsilon layernorm_zero_centered_gamma activation_func_clamp_value glu_linear_offset
    moe_apply_probs_on_input no_rope_freq softmax_scale softmax_type rotary_interleaved rotary_base rotary_percent
    rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
""".split()
UNFOLLOWED = {
    "apply_query_key_layer_scaling": "uses no code that reads it",
    "batch_invariant_mode": "uses no code that reads it",
    "bf16": "set the dtype",
    "config_logger_dir": "uses no code that reads it",
    "delay_wgrad_compute": "overlap_moe_expert_parallel_comm is not supported",
    "enable_autocast": "would round",
    "fine_grained_activation_offloading": "forward passes without gradients break",
    "fp32_residual_connection": "the dtype of their weights",
    "log_max_attention_logit": "not clipped",
    "memory_efficient_layer_norm": "uses no code that reads it",
    "moe_layer_recompute": r"use recompute_modules: \[moe\]",
    "num_microbatches_with_partial_activation_checkpoints": "no process groups or schedules",
    "pipeline_model_parallel_comm_backend": "uses no code that reads it",
    "qk_clip": "not clipped",
    "qk_clip_alpha": "not clipped",
    "use_fused_weighted_squared_relu": "not tested",
    "use_inference_optimized_layers": "uses no code that reads it",
    "use_te_rng_tracker": "uses no code that reads it",
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_says_what_weights_mean_belongs_to_the_model(name: str) -> None:
    with pytest.raises(McaError, match=f"{name} belongs to the model, .*config.json"):
        DistributingParallelArguments(additional_configs={name: 1})


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_no_run_follows_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(McaError, match=rf"{name} is not supported \(.*{UNFOLLOWED[name]}"):
        DistributingParallelArguments(additional_configs={name: 1})


def test_what_is_followed_and_refused_is_megatrons_and_nothing_is_both() -> None:
    followed = {name for names in _additional.SUPPORTED.values() for name in names}
    assert followed <= KNOWN - _megatron_keys.ARCHITECTURE - ARGUMENTS
    tables = (_additional._UNSUPPORTED, _additional._DETAILS)
    for pattern in (pattern for table in tables for patterns in table.values() for pattern in patterns):
        assert any(fnmatch(name, pattern) for name in KNOWN), pattern
    refused = [pattern for patterns in _additional._UNSUPPORTED.values() for pattern in patterns]
    assert not [name for name in followed for pattern in refused if fnmatch(name, pattern)]


def test_the_documents_name_all_that_is_followed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "keys.md").read_text(encoding="utf-8")
    table = page.partition("## Any other setting of Megatron")[2].partition("On the local layers")[0]
    named = [name for row in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall("`(.*?)`", row)]
    followed = {name for names in _additional.SUPPORTED.values() for name in names}
    assert followed == {name for name in followed if any(fnmatch(name, each) for each in named)}
    assert not [each for each in named if not any(fnmatch(name, each) for name in followed)]


def test_a_setting_of_a_newer_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(McaError, match="unknown key attends_twice"):
        DistributingParallelArguments(additional_configs={"attends_twice": True})
    known = _additional.settable_keys()
    monkeypatch.setattr(_additional, "settable_keys", lambda: known | {"attends_twice"})
    with pytest.raises(McaError, match=r"attends_twice is not supported \(it is not tested"):
        DistributingParallelArguments(additional_configs={"attends_twice": True})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layers_at_start: {{ N }}", "a key is a list or a mapping"),
        ("moe_ffn_hidden_size: 1\nmoe_ffn_hidden_size: 2", "key 'moe_ffn_hidden_size' is given twice"),
        ("moe_ffn_hidden_size:\t1", ".* line 1, column 21; replace the tab with spaces$"),
    ],
)
def test_a_yaml_file_of_settings_that_is_not_valid(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    path.write_text(text)
    with pytest.raises(McaError, match=f"additional_configs: {path} is not valid YAML: {message}"):
        DistributingParallelArguments(additional_configs=str(path))


def test_additional_configs_from_json_file_yaml_and_dict(tmp_path: Path) -> None:
    settings = {"disable_parameter_transpose_cache": True, "moe_deepep_num_sms": 24}
    as_json, as_yaml = tmp_path / "more.json", tmp_path / "more.yaml"
    as_json.write_text(json.dumps(settings))
    as_yaml.write_text("disable_parameter_transpose_cache: true\nmoe_deepep_num_sms: 24\n")
    for given in (settings, json.dumps(settings), str(as_json), str(as_yaml)):
        args = DistributingParallelArguments(moe_token_dispatcher_type="flex", additional_configs=given)
        assert args.additional_configs == settings
        assert settings.items() <= args.transformer_config_overrides().items()


def test_a_setting_that_has_its_own_argument_becomes_it() -> None:
    args = DistributingParallelArguments(
        additional_configs={"tensor_model_parallel_size": 2, "moe_grouped_gemm": True}
    )
    assert args.layout().tp == 2
    assert args.moe_grouped_gemm is True
    assert args.additional_configs == {}
    with pytest.raises(
        McaError, match="parallel_size is 2, but the argument tensor_model_parallel_size is 4"
    ):
        DistributingParallelArguments(
            tensor_model_parallel_size=4, additional_configs={"tensor_model_parallel_size": 2}
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"moe_grouped_gem": True}, ["unknown key moe_grouped_gem", "did you mean moe_grouped_gemm?"]),
        ({"hidden_size": 8}, ["hidden_size belongs to the model"]),
        ({"attention_output_gate": True}, ["attention_output_gate belongs to the model"]),
        ({"moe_router_topk": 4}, ["moe_router_topk belongs to the model"]),
        ({"mamba_num_heads": 2}, ["mamba_num_heads belongs to the model"]),
        ({"inference_sampling_seed": 2}, ["inference_sampling_seed is not supported (it is for inference)"]),
        ({"cuda_graph_impl": "local"}, ["cuda_graph_impl is not supported (mca captures no CUDA graphs)"]),
        ({"init_method_std": 0.1}, ["init_method_std is not supported (weights are filled from"]),
        ({"moe_token_dropping": True}, ["moe_token_dropping is not supported (Megatron does not read"]),
        ({"fp4": "e2m1"}, ["fp4 is not supported"]),
        ({"hybrid_context_parallel": True}, ["hybrid_context_parallel is not supported (mca creates no"]),
        ({"use_kitchen": True}, ["use_kitchen is not supported"]),
        ({"fused_single_qkv_rope": True}, ["fused_single_qkv_rope is not supported (it omits factors"]),
        ({"moe_per_layer_logging": True}, ["MoE losses are logged as one sum"]),
        ({"test_mode": True}, ["test_mode is not supported"]),
        ({"tp_comm_bulk_wgrad": True}, ["tp_comm_bulk_wgrad is not supported (tp_comm_overlap is not"]),
        ({"fp8_quantizer_factory": "a.b"}, ["fp8_recipe custom is not supported"]),
        ({"fp8_margin": 1}, ["fp8_margin needs fp8; add it"]),
        ({"moe_deepep_num_sms": 20}, ["moe_deepep_num_sms needs moe_token_dispatcher_type flex; add it"]),
        (
            {"moe_token_dispatcher_type": "flex", "moe_hybridep_num_sms": 8},
            ["moe_hybridep_num_sms needs moe_flex_dispatcher_backend hybridep; add it"],
        ),
        ({"num_layers_at_end_in_bf16": 2}, ["num_layers_at_end_in_bf16 needs first_last_layers_bf16"]),
        ({"first_last_layers_bf16": True}, ["first_last_layers_bf16 needs fp8"]),
        ({"fp8_interval": 2}, ["fp8_interval is not supported (Megatron does not read"]),
        ({"cpu_offloading_weights": True}, ["cpu_offloading_weights needs cpu_offloading"]),
        ({"offload_modules": ["attn"]}, ["offload_modules is not supported (forward passes without"]),
        ({"finalize_model_grads_func": 1}, ["unknown key finalize_model_grads_func"]),
        ("{broken", ["additional_configs: not valid JSON"]),
        ("no/such/file.json", ["neither inline JSON nor an existing file"]),
        ([1], ["must be an object"]),
    ],
)
def test_wrong_additional_configs_are_named(given: Any, words: list[str]) -> None:
    with pytest.raises(McaError) as error:
        DistributingParallelArguments(additional_configs=given)
    assert all(word in str(error.value) for word in words), error.value


def test_a_detail_whose_switch_is_on_is_accepted() -> None:
    given = DistributingParallelArguments(fp8="hybrid", additional_configs={"fp8_margin": 1})
    assert given.transformer_config_overrides() == {"fp8": "hybrid", "fp8_margin": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_deepep_num_sms": 20},
        {"moe_flex_dispatcher_backend": "deepep", "moe_deepep_num_sms": 20, "moe_enable_deepep": True},
        {"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_num_sms": 8},
    ],
)
def test_a_detail_of_the_backend_that_exchanges_tokens_is_accepted(settings: dict[str, Any]) -> None:
    given = DistributingParallelArguments(moe_token_dispatcher_type="flex", additional_configs=settings)
    assert given.additional_configs == settings


@pytest.mark.parametrize("name", ["qk_clip", "fp32_residual_connection", "moe_router_padding_for_fp8"])
def test_what_only_says_that_it_is_off_is_left_out(name: str) -> None:
    for value in (False, None):
        given = DistributingParallelArguments(additional_configs={name: value, "moe_enable_deepep": False})
        assert given.additional_configs == {"moe_enable_deepep": False}
    with pytest.raises(McaError, match=f"{name} is not supported"):
        DistributingParallelArguments(additional_configs={name: True})


@pytest.mark.parametrize(
    "recipe,detail,needed",
    [
        ("blockwise", {"fp8_margin": 1}, "fp8_recipe delayed"),
        ("tensorwise", {"fp8_amax_history_len": 16}, "fp8_recipe delayed"),
        ("tensorwise", {"fp8_wgrad": False}, "fp8_recipe delayed"),
        ("mxfp8", {"fp8_dot_product_attention": True}, "fp8_recipe delayed or tensorwise"),
    ],
)
def test_a_detail_that_a_recipe_does_not_follow_is_refused(recipe: str, detail: Any, needed: str) -> None:
    (name,) = detail
    with pytest.raises(McaError, match=f"{name} needs {needed}; add it or remove {name}"):
        DistributingParallelArguments(fp8="hybrid", fp8_recipe=recipe, additional_configs=detail)


def test_a_detail_that_several_recipes_follow_is_accepted() -> None:
    detail = {"fp8_dot_product_attention": True}
    for recipe in (None, "delayed", "tensorwise"):
        DistributingParallelArguments(fp8="hybrid", fp8_recipe=recipe, additional_configs=detail)


def test_a_broken_settings_file_is_named(tmp_path: Path) -> None:
    for name, text in (("a.json", "["), ("a.yaml", "a: [")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(McaError, match=name):
            DistributingParallelArguments(additional_configs=str(path))
