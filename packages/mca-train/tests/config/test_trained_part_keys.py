"""Trained parts of multimodal models, and keys about them that raise an error."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_models.templates import config_from_hf
from mca_train.config.arguments import LoraArguments
from mca_train.config.model import make_adapter
from mca_train.config.model_parts import PART_RATES, part_problems, trained_parts

CONFIGS = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs"


def _config(name):
    return config_from_hf(json.loads((CONFIGS / f"{name}.json").read_text()))


BOTH, HEARING, OMNI = map(_config, ("qwen2.5-vl-72b", "qwen2-audio-7b", "qwen3-omni-30b-a3b"))
TEXT = SimpleNamespace(vision=None, model_type="llama")


def arguments(**given):
    keys = ("freeze", *PART_RATES.values(), "overlap_param_gather")
    return SimpleNamespace(**({key: None for key in keys} | given))


def problems(config=BOTH, lora_rank=None, adapter=None, **given):
    lora = LoraArguments(lora_rank=lora_rank, adapter_name_or_path=adapter)
    return list(part_problems(arguments(**given), lora, config, None))


def test_text_alone_is_trained_by_default():
    for config in (BOTH, HEARING, OMNI, TEXT):
        assert trained_parts(arguments(), config) == {"language"}
        assert problems(config) == []
    assert trained_parts(arguments(freeze=["vision"]), BOTH) == {"language", "projector"}
    assert trained_parts(arguments(freeze=[]), BOTH) == {"language", "projector", "vision"}
    assert trained_parts(arguments(freeze=[]), HEARING) == {"language", "projector", "audio"}
    assert trained_parts(arguments(freeze=["audio"]), OMNI) == {"language", "projector", "vision"}
    assert problems(freeze=["vision", "projector"]) == []


@pytest.mark.parametrize(
    ("reported", "given"),
    [
        ("freeze: a llama model has one part; remove the key", {"config": TEXT, "freeze": ["vision"]}),
        (
            "freeze: vision: a qwen2_audio model has no such part, only language, audio, projector; remove it",
            {"config": HEARING, "freeze": ["vision", "projector", "audio"]},
        ),
        (
            "audio_learning_rate: a qwen2_5_vl model has no such part",
            {"audio_learning_rate": 1e-5, "lora_rank": 4},
        ),
        ("vision_learning_rate: vision is frozen; set freeze", {"vision_learning_rate": 1e-5}),
        (
            "vision_learning_rate: an adapter has one learning rate",
            {"lora_rank": 4, "vision_learning_rate": 1.0},
        ),
        (
            "freeze: the adapter of adapter_name_or_path has its own settings",
            {"adapter": "there", "freeze": []},
        ),
        ("freeze: language, vision, projector are all", {"freeze": ["vision", "projector", "language"]}),
    ],
)
def test_keys_that_cannot_be_followed_are_told(reported, given):
    found, *_ = problems(**given)
    assert found.startswith(reported)


def test_weights_of_a_trained_part_are_not_gathered_while_it_runs():
    given = arguments(overlap_param_gather=True, freeze=["vision"])
    first = next(part_problems(given, LoraArguments(), BOTH, None))
    assert first.startswith("overlap_param_gather is not supported with a trained vision or audio tower")
    assert problems(overlap_param_gather=True) == []  # text alone is trained


@pytest.mark.parametrize("parts", [{"language"}, {"vision", "projector"}])
def test_a_planned_adapter_is_on_the_trained_parts_alone(parts):
    lora = LoraArguments(lora_rank=2, lora_target_modules=["all-linear"])
    _, rules = make_adapter(lora, BOTH, parts)
    assert {pair.target.is_vision for pair in rules.factors} == {parts != {"language"}}
