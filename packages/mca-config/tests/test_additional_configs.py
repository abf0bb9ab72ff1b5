"""``additional_configs`` takes those settings of Megatron's of which it is known what they do to a run."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mca_config import DistributingParallelArguments, McaError, _megatron_keys
from mca_config.arguments import _additional, _unfollowed

KNOWN = _megatron_keys.COMMON | _megatron_keys.ONLY_0_16 | _megatron_keys.ONLY_0_19
ARGUMENTS = frozenset(DistributingParallelArguments.__dataclass_fields__)
MEANINGS = """
    layernorm_epsilon layernorm_zero_centered_gamma activation_func_clamp_value glu_linear_offset
    moe_apply_probs_on_input no_rope_freq softmax_scale softmax_type rotary_interleaved rotary_base rotary_percent
    rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
""".split()
UNFOLLOWED = {
    "apply_query_key_layer_scaling": "looks at it",
    "batch_invariant_mode": "looks at it",
    "bf16": "say the dtype",
    "config_logger_dir": "looks at it",
    "delay_wgrad_compute": "overlap_moe_expert_parallel_comm is not supported",
    "enable_autocast": "would be rounded",
    "fp32_residual_connection": "the dtype of their weights",
    "log_max_attention_logit": "not clipped",
    "memory_efficient_layer_norm": "looks at it",
    "moe_layer_recompute": r"use recompute_modules: \[moe\]",
    "num_microbatches_with_partial_activation_checkpoints": "no groups or schedules",
    "pipeline_model_parallel_comm_backend": "looks at it",
    "qk_clip": "not clipped",
    "qk_clip_alpha": "not clipped",
    "use_fused_weighted_squared_relu": "not tried",
    "use_inference_optimized_layers": "looks at it",
    "use_te_rng_tracker": "looks at it",
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
    followed = {name for names in _unfollowed.FOLLOWED.values() for name in names}
    assert followed <= KNOWN - _megatron_keys.ARCHITECTURE - ARGUMENTS
    tables = (_unfollowed._NOWHERE, _unfollowed._DETAILS)
    for pattern in (pattern for table in tables for patterns in table.values() for pattern in patterns):
        assert any(fnmatch(name, pattern) for name in KNOWN), pattern
    refused = [pattern for patterns in _unfollowed._NOWHERE.values() for pattern in patterns]
    assert not [name for name in followed for pattern in refused if fnmatch(name, pattern)]


def test_the_documents_name_all_that_is_followed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## Any other setting of Megatron")[2].partition("On the local layers")[0]
    named = [name for row in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall("`(.*?)`", row)]
    followed = {name for names in _unfollowed.FOLLOWED.values() for name in names}
    assert followed == {name for name in followed if any(fnmatch(name, each) for each in named)}
    assert not [each for each in named if not any(fnmatch(name, each) for name in followed)]


def test_a_setting_of_a_newer_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(McaError, match="unknown key attends_twice"):
        DistributingParallelArguments(additional_configs={"attends_twice": True})
    known = _additional.settable_keys()
    monkeypatch.setattr(_additional, "settable_keys", lambda: known | {"attends_twice"})
    with pytest.raises(McaError, match=r"attends_twice is not supported \(it is not tried"):
        DistributingParallelArguments(additional_configs={"attends_twice": True})
