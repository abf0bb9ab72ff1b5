"""Rotary frequencies equal those of transformers, for every kind of scaling."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mca_config.errors import McaError
from mca_models.megatron.features.rope import with_layer_rope
from mca_models.megatron.layers.rope import (
    attention_factor,
    dynamic_frequencies,
    frequencies,
    long_frequencies,
)
from mca_models.templates import config_from_hf

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1 + i / 50 for i in range(32)],
        "long_factor": [1 + i / 5 for i in range(32)],
    },
]


def hf_config(rope: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 50000.0, **rope},
    )


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: "-".join(map(str, list(rope.values())[:3])))
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    hf = hf_config(rope)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, "cpu")
    config = config_from_hf(hf.to_dict())
    torch.testing.assert_close(frequencies(config), expected, rtol=1e-6, atol=0)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)


def test_unscaled_frequencies() -> None:
    config = config_from_hf(hf_config({"rope_type": "default"}).to_dict())
    expected = 1.0 / (50000.0 ** (torch.arange(0, 64, 2) / 64))
    torch.testing.assert_close(frequencies(config), expected)


def test_dynamic_frequencies_grow_with_the_sequence() -> None:
    hf = hf_config({"rope_type": "dynamic", "factor": 2.0})
    config = config_from_hf(hf.to_dict())
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf, "cpu", seq_len=400)
    torch.testing.assert_close(dynamic_frequencies(config, 400), expected)


def test_longrope_changes_its_factors_beyond_the_original_context() -> None:
    hf = hf_config(SCALINGS[-1])
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](hf, "cpu", seq_len=65)
    torch.testing.assert_close(long_frequencies(config_from_hf(hf.to_dict()), 65), expected)


def test_an_unknown_kind_is_refused_by_name() -> None:
    hf = hf_config({"rope_type": "default"}).to_dict()
    hf["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "spiral"}
    with pytest.raises(McaError, match=r"spiral.*supported"):
        frequencies(config_from_hf(hf))


def test_a_missing_parameter_is_named() -> None:
    hf = hf_config({"rope_type": "default"}).to_dict()
    hf["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0}
    with pytest.raises(McaError, match=r"needs low_freq_factor, high_freq_factor$"):
        frequencies(config_from_hf(hf))


class AsAKernel(torch.nn.Module):
    """Attention that reads what it rotates by as Transformer Engine's kernel does: one row behind the other."""

    def __init__(self, config: Any, *, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, *, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
        """Return the angles that the model read."""
        strides = torch.empty(rotary_pos_emb.shape).stride()
        return rotary_pos_emb.as_strided(rotary_pos_emb.shape, strides)


def test_a_layer_with_a_rope_of_its_own_hands_on_what_a_kernel_reads_rightly() -> None:
    attention = with_layer_rope(AsAKernel, ("full_attention", "sliding_attention"), 1.0, (4, 6))
    both = torch.randn(5, 1, 1, 10, generator=torch.Generator().manual_seed(3))
    config = SimpleNamespace(softmax_scale=None, kv_channels=8)
    for number, expected in enumerate(both.split((4, 6), -1), 1):
        assert torch.equal(attention(config, layer_number=number)(rotary_pos_emb=both), expected)


class ScaleAtConstruction:
    """Attention that keeps the scale of scores that its configuration had when it was built."""

    def __init__(self, config: Any, *, layer_number: int) -> None:
        self.layer_number, self.scale = layer_number, config.softmax_scale


@pytest.mark.parametrize("before", [None, 0.5])
def test_yarn_scales_scores_of_full_attention_layers_alone(before: float | None) -> None:
    config = SimpleNamespace(softmax_scale=before, kv_channels=16)
    kinds = ("full_attention", "sliding_attention")
    scaled = with_layer_rope(ScaleAtConstruction, kinds, 1.5, (4, 6))
    assert scaled(config, layer_number=1).scale == pytest.approx((before or 0.25) * 2.25)
    assert scaled(config, layer_number=2).scale == before
    assert config.softmax_scale == before
    plain = with_layer_rope(ScaleAtConstruction, kinds, 1.0, (4, 6))
    assert plain(config, layer_number=1).scale == before
