"""Which parts of a vision-language model are trained, and what stands against it."""

from types import SimpleNamespace

import pytest

from mca_train.config.arguments import LoraArguments
from mca_train.config.parts import part_problems, trained_parts

TEXT = SimpleNamespace(vision=None, model_type="llama")
BOTH = SimpleNamespace(vision={"image_token_id": 5}, model_type="qwen2_5_vl")


def arguments(**given):
    keys = ("freeze", "vision_learning_rate", "projector_learning_rate")
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
    ("told", "given"),
    [
        ("freeze: a llama model has no vision part; remove the key", {"config": TEXT, "freeze": ["vision"]}),
        ("vision_learning_rate: vision is frozen; set freeze", {"vision_learning_rate": 1e-5}),
        (
            "vision_learning_rate: an adapter has one learning rate",
            {"lora_rank": 4, "vision_learning_rate": 1.0},
        ),
        ("freeze: the adapter of adapter_name_or_path says", {"adapter": "there", "freeze": []}),
        ("freeze: language cannot be frozen yet", {"freeze": ["vision", "projector", "language"]}),
    ],
)
def test_keys_that_cannot_be_followed_are_told(told, given):
    (found,) = problems(**given)
    assert found.startswith(told)
