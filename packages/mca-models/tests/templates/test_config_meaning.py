"""What ``config.json`` says of ropes and of training means what it means to transformers."""

from typing import Any

import pytest
import transformers
from tiny_hf import ALL, SIZE

from mca_config.errors import McaError
from mca_models.templates import FAMILIES, config_from_hf

HALF = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}


def described(case: str, **different: Any) -> dict[str, Any]:
    kind, base = ALL[case]
    return {**SIZE, "model_type": kind, "num_experts_per_tok": 2, **base, **different}


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gpt_oss", "exaone4", "deepseek_v3", "gemma2"])
def test_families_without_partial_rotary_rotate_all_of_a_head(case: str) -> None:
    assert (
        config_from_hf(described(case, rope_parameters={**HALF, "rope_type": "default"})).rotary_percent == 1
    )
    assert config_from_hf(described(case, rope_parameters=None, **HALF)).rotary_percent == 1


def test_a_partial_rotary_that_transformers_fails_with_is_refused() -> None:
    rope = {**HALF, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(McaError, match=r"'partial_rotary_factor' is 0.5 beside rope_type 'linear'.*1\.0"):
        config_from_hf(described("llama", rope_parameters=rope))


@pytest.mark.parametrize("case", ["phi3", "minimax_m2", "glm4_moe", "qwen3_next", "qwen3_5_text"])
def test_families_with_partial_rotary_keep_it(case: str) -> None:
    rope = {**HALF, "rope_type": "default"}
    assert config_from_hf(described(case, rope_parameters=rope)).rotary_percent == 0.5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_gpt_oss_without_a_rope_has_its_own(key: str) -> None:
    found = config_from_hf(described("gpt_oss", **{key: None}))
    theirs = transformers.GptOssConfig.from_dict({key: None}).rope_parameters
    assert {"rope_theta": found.rotary_base, **(found.rope_scaling or {})} == theirs


def test_residual_dropout_is_followed() -> None:
    assert config_from_hf(described("phi3", resid_pdrop=0.3)).hidden_dropout == 0.3
    assert config_from_hf(described("phi3")).hidden_dropout == 0.0
    assert (
        config_from_hf(described("seed_oss")).hidden_dropout == transformers.SeedOssConfig().residual_dropout
    )
    assert config_from_hf(described("seed_oss", residual_dropout=0.0)).hidden_dropout == 0.0


@pytest.mark.parametrize("case", ["mixtral", "minimax_m2"])
def test_router_jitter_is_refused(case: str) -> None:
    assert config_from_hf(described(case, router_jitter_noise=0.0))
    with pytest.raises(McaError, match=r"'router_jitter_noise' is 0\.2"):
        config_from_hf(described(case, router_jitter_noise=0.2))


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_more_experts_for_a_token_than_its_groups_have_are_refused(case: str) -> None:
    assert config_from_hf(described(case, num_experts_per_tok=3, topk_group=2))
    with pytest.raises(McaError, match=r"'num_experts_per_tok' is 3.* up to 2, or a larger 'topk_group'"):
        config_from_hf(described(case, num_experts_per_tok=3))


UNPADDED = {"nemotron_h"}  # a padding token is like any other to their embedding


@pytest.mark.parametrize("kind", sorted(kind for kind, family in FAMILIES.items() if family.vision is None))
def test_the_padding_token_that_is_not_named_is_transformers(kind: str) -> None:
    case = next(case for case, (model_type, _) in ALL.items() if model_type == kind)
    without = {key: value for key, value in described(case).items() if key != "pad_token_id"}
    theirs = None if kind in UNPADDED else transformers.AutoConfig.for_model(kind).pad_token_id
    assert config_from_hf(without).pad_token_id == theirs
    assert config_from_hf({**without, "pad_token_id": None}).pad_token_id is None


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("ssm_in_multiplier", float("nan"), "'ssm_in_multiplier' is nan; supported: a number"),
        ("ssm_out_multiplier", None, "'ssm_out_multiplier' is None; supported: a number"),
        ("attention_in_multiplier", [1.0], r"'attention_in_multiplier' is \[1.0\]; supported: a number"),
        ("attention_out_multiplier", float("inf"), "'attention_out_multiplier' is inf; supported: a number"),
        ("key_multiplier", "x", "'key_multiplier' is 'x'; supported: a number"),
        ("lm_head_multiplier", None, "'lm_head_multiplier' is None; supported: a number"),
        ("lm_head_multiplier", 0, "'lm_head_multiplier' is 0.0; supported: a number above 0"),
        ("embedding_multiplier", float("nan"), "embedding_multiplier must be a finite number"),
        ("ssm_multipliers", [1.0] * 4, "'ssm_multipliers' is .*; supported: 5 numbers"),
        ("ssm_multipliers", 1.0, "'ssm_multipliers' is 1.0; supported: 5 numbers"),
        ("mamba_d_ssm", "x", "mamba_d_ssm is .x.; supported: a multiple of mamba_n_heads"),
        ("mamba_d_ssm", 50, "mamba_d_ssm is 50; supported: a multiple of mamba_n_heads, which is 8"),
    ],
)
def test_falcon_h1_is_refused_by_the_key_that_is_wrong(key: str, value: Any, told: str) -> None:
    with pytest.raises(McaError, match=told):
        config_from_hf(described("falcon_h1", **{"mamba_d_head": "auto", key: value}))


def test_blocks_of_an_indexer_that_fill_memory_are_refused() -> None:
    with pytest.raises(
        McaError, match=r"'index_block_size' is 10{12}; supported: whole numbers from 1 to 1048576"
    ):
        config_from_hf(described("minimax_m3_vl_text", index_block_size=10**12))
