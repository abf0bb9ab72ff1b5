"""Which parts of a vision-language model are trained, and what stands against it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_models.templates import config_from_hf
from mca_train.config.arguments import LoraArguments
from mca_train.config.model import make_adapter
from mca_train.config.model_parts import part_problems, trained_parts

TEXT = SimpleNamespace(vision=None, model_type="llama")
BOTH = SimpleNamespace(vision={"image_token_id": 5}, model_type="qwen2_5_vl")


def arguments(**given):
    keys = ("freeze", "vision_learning_rate", "projector_learning_rate", "overlap_param_gather")
    return SimpleNamespace(**({key: None for key in keys} | given))


def problems(config=BOTH, lora_rank=None, adapter=None, **given):
    lora = LoraArguments(lora_rank=lora_rank, adapter_name_or_path=adapter)
    return list(part_problems(arguments(**given), lora, config, None))


def test_vision_and_projector_are_frozen_unless_told():
    assert trained_parts(arguments()) == {"language"}
    assert trained_parts(arguments(freeze=["vision"])) == {"language", "projector"}
    assert trained_parts(arguments(freeze=[])) == {"language", "projector", "vision"}
    assert problems() == problems(TEXT) == problems(freeze=["vision", "projector"]) == []


@pytest.mark.parametrize(
    ("reported", "given"),
    [
        ("freeze: a llama model has no vision part; remove the key", {"config": TEXT, "freeze": ["vision"]}),
        ("vision_learning_rate: vision is frozen; set freeze", {"vision_learning_rate": 1e-5}),
        (
            "vision_learning_rate: an adapter has one learning rate",
            {"lora_rank": 4, "vision_learning_rate": 1.0},
        ),
        (
            "freeze: the adapter of adapter_name_or_path has its own settings",
            {"adapter": "there", "freeze": []},
        ),
        ("freeze: vision, projector, language are all", {"freeze": ["vision", "projector", "language"]}),
    ],
)
def test_keys_that_cannot_be_followed_are_told(reported, given):
    (found,) = problems(**given)
    assert found.startswith(reported)


def test_weights_of_a_trained_part_are_not_gathered_while_it_runs():
    given = arguments(overlap_param_gather=True, freeze=["vision"])
    first = next(part_problems(given, LoraArguments(), BOTH, None))
    assert first.startswith("overlap_param_gather is not supported with a trained vision tower")
    assert problems(overlap_param_gather=True) == []  # text alone is trained


@pytest.mark.parametrize("parts", [{"language"}, {"vision", "projector"}])
def test_a_planned_adapter_is_on_the_trained_parts_alone(parts):
    file = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs/qwen2.5-vl-72b.json"
    config = config_from_hf(json.loads(file.read_text()))
    lora = LoraArguments(lora_rank=2, lora_target_modules=["all-linear"])
    _, rules = make_adapter(lora, config, parts)
    assert {pair.target.sees for pair in rules.factors} == {parts != {"language"}}
