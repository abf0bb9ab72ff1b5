"""Clips of Qwen's omni models: numbers of tokens, and features that do not depend on other clips."""

import copy
from importlib import import_module
from typing import Any

import pytest
import tiny_vision
import torch
import transformers

from mca_models.megatron.features.media_features import run_clips
from mca_models.templates import config_from_hf, get_family

KINDS = ("qwen2_5_omni", "qwen3_omni_moe")
FRAMES = (61, 224, 100, 9)


def audio_tower(kind: str) -> Any:
    vision = get_family(f"{kind}_thinker").vision
    assert vision is not None and vision.audio is not None
    return vision.audio


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_clip_are_counted_as_in_transformers(kind: str) -> None:
    config = config_from_hf(tiny_vision.described(f"{kind}_thinker"))
    theirs = import_module(f"transformers.models.{kind}.processing_{kind}")._get_feat_extract_output_lengths
    frames = range(3, 420)
    assert [audio_tower(kind).tokens(config, count) for count in frames] == [
        theirs(count) for count in frames
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_has_the_features_that_it_has_alone(kind: str) -> None:
    described = tiny_vision.described(f"{kind}_thinker")
    config, audio = config_from_hf(described), audio_tower(kind)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**copy.deepcopy(described)))
    with torch.no_grad():
        for parameter in model.audio_tower.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.eval()
    frames = torch.tensor(FRAMES)
    clips = {
        "input_features": torch.randn(len(FRAMES), 8, max(FRAMES)),
        "feature_attention_mask": (torch.arange(max(FRAMES)) < frames[:, None]).long(),
    }
    with torch.no_grad():
        together = run_clips(model, clips, config, audio)
        alone = [
            model.get_audio_features(
                clips["input_features"][[number]], clips["feature_attention_mask"][[number]], return_dict=True
            ).last_hidden_state
            for number in range(len(FRAMES))
        ]
    assert [len(each) for each in alone] == [audio.tokens(config, count) for count in FRAMES]
    # products of matrices of other sizes are rounded otherwise
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert together.std() > 0.01
