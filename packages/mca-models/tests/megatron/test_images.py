"""Reasons why a model takes no images, its parts, and the channels of each position."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_vision
import torch
import transformers
from transformers import Gemma3Config

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.media import ImageSpan
from mca_models.megatron.features import media
from mca_models.megatron.features.media import image_problems, image_reach
from mca_models.megatron.features.media_features import assign_images, compute_image_features
from mca_models.megatron.features.mrope import mrope_axes
from mca_models.megatron.features.mtp import widened_length
from mca_models.megatron.features.processor_media import sequence_media
from mca_models.megatron.features.vision_tower import vision_model
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.parts.vision_language import model_part, model_parts

VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def megatron(**settings: Any) -> SimpleNamespace:
    plain = {"apply_rope_fusion": False, "transformer_impl": "local", "attention_backend": None}
    return SimpleNamespace(**{**plain, **settings})


@pytest.mark.parametrize(
    ("case", "layout", "change", "message"),
    [
        ("qwen3_vl", {}, {"vision_fields": None}, "has no vision model"),
        ("gemma3", {}, {"attn_logit_softcapping": 30.0}, "softcapping cannot be combined with images"),
        ("gemma4-e2b", {}, {"pad_token_id": None}, "pad_token_id is null, of which images take"),
        (
            "gemma3",
            {},
            {"mtp_num_layers": 1},
            "attend in both directions, because .* set mtp_num_layers to 0",
        ),
        (
            "qwen3_5",
            {
                "pipeline_model_parallel_size": 3,
                "virtual_pipeline_model_parallel_size": 1,
                "pipeline_model_parallel_layout": "Et*2|t*2m|L",
            },
            {"mtp_num_layers": 1},
            "another pipeline stage than the loss .* move m of",
        ),
        ("qwen3_vl", VIRTUAL, {}, "the first pipeline stage has 1 layer; .* the first 2"),
    ],
)
def test_what_cannot_take_images_says_why(
    case: str, layout: dict[str, int], change: dict[str, Any], message: str
) -> None:
    config = config_from_hf(tiny_vision.described(case)).replace_fields(**change)
    (problem,) = image_problems(config, ParallelLayout(**layout), megatron())
    assert re.search(message, problem)


def test_mtp_layers_do_not_matter_without_training() -> None:
    config = config_from_hf(tiny_vision.described("gemma3")).replace_fields(mtp_num_layers=1)
    assert not image_problems(config, ParallelLayout(), megatron(), trains=False)


@pytest.mark.parametrize(
    ("layers", "stages", "has_media", "expected"),
    [(2, 2, True, 15), (None, 2, True, 5), (2, 1, True, 5), (2, 2, False, 5)],
)
def test_features_of_media_are_sent_for_each_mtp_layer(
    layers: int | None, stages: int, has_media: bool, expected: int
) -> None:
    assert widened_length(5, layers, stages, has_media=has_media) == expected


def test_images_of_gemma3_are_256_tokens_that_see_each_other_if_the_file_does_not_say() -> None:
    document = tiny_vision.described("gemma3")
    assert image_reach(config_from_hf(document)) == 3
    del document["mm_tokens_per_image"]
    assert image_reach(config_from_hf(document)) == 255 == Gemma3Config().mm_tokens_per_image - 1
    assert not image_reach(config_from_hf(tiny_vision.described("internvl")))


def test_fused_rope_has_one_position_for_each_token() -> None:
    config = config_from_hf(tiny_vision.described("qwen2_vl"))
    assert (
        "apply_rope_fusion" in image_problems(config, ParallelLayout(), megatron(apply_rope_fusion=True))[0]
    )
    assert not image_problems(config, ParallelLayout(), megatron())


def test_images_that_attend_both_ways_need_our_attention() -> None:
    config = config_from_hf(tiny_vision.described("gemma3"))
    engine = megatron(transformer_impl="transformer_engine")
    assert "set attention_backend to local" in image_problems(config, ParallelLayout(), engine)[0]
    local = megatron(transformer_impl="transformer_engine", attention_backend=SimpleNamespace(name="local"))
    assert not image_problems(config, ParallelLayout(), local)


@pytest.mark.parametrize("case", sorted(tiny_vision.CASES))
def test_every_parameter_belongs_to_a_part(case: str) -> None:
    config = config_from_hf(tiny_vision.described(case))
    parts = {param.mca: model_part(param, config) for param in get_family(config.model_type).params(config)}
    assert set(parts.values()) - {"unused"} == {*model_parts(config)}
    tower = {part for name, part in parts.items() if name.startswith("vision_model.")}
    towers = {"vision_config": "vision", "audio_config": "audio"}
    named = {part for key, part in towers.items() if (config.vision_fields or {}).get(key)}
    audio = {part for name, part in parts.items() if "audio_tower" in name} - {"projector", "unused"}
    assert tower - {"unused"} == {"projector", *(named - {"audio"} if case == "gemma4_unified" else named)}
    assert audio <= {"audio"}


@pytest.mark.parametrize("case", sorted(tiny_vision.CASES))
def test_a_tower_has_the_dtype_of_the_model(case: str) -> None:
    """Transformers builds some of its tensors in fp32, and files have them in the dtype of all others."""
    tower = vision_model(config_from_hf(tiny_vision.described(case)), torch.bfloat16)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}


def test_channels_follow_time_rows_and_columns() -> None:
    assert mrope_axes((2, 1, 1), 4, interleaved=False).tolist() == [0, 0, 1, 2]
    assert mrope_axes((4, 2, 2), 8, interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("loads", [[5], [3, 3, 3], [8, 1, 1, 1, 1, 4], [2, 7, 7, 2, 9, 1, 1]])
@pytest.mark.parametrize("ranks", [2, 4])
def test_images_are_dealt_evenly(loads: list[int], ranks: int) -> None:
    owners = assign_images(loads, ranks)
    busy = [
        sum(load for load, owner in zip(loads, owners, strict=True) if owner == rank) for rank in range(ranks)
    ]
    assert sum(busy) == sum(loads)
    assert max(busy) <= max(max(loads), sum(loads) / ranks + max(loads) * (1 - 1 / ranks))


@pytest.mark.parametrize(("case", "key"), [("qwen3_vl", "image_token_id"), ("gemma3", "image_token_index")])
def test_placeholders_are_no_words(case: str, key: str) -> None:
    config = config_from_hf(tiny_vision.described(case))
    assert config.vision_fields is not None
    place = config.vision_fields[key]
    assert sequence_media(torch.tensor([1, 2]), None, config) is None
    with pytest.raises(
        McaError, match=r"input_ids have placeholders: 1 of images; the media .* have 0 tokens"
    ):
        sequence_media(torch.tensor([1, place]), None, config)


def test_outputs_of_a_processor_are_checked() -> None:
    config = config_from_hf(tiny_vision.described("qwen3_vl"))
    assert config.vision_fields is not None
    image, video = (config.vision_fields[f"{medium}_token_id"] for medium in ("image", "video"))
    pictures = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    ids = torch.tensor([1, image, 2])
    found = sequence_media(ids, {**pictures, "mm_token_type_ids": torch.zeros(3)}, config)
    assert found is not None
    assert found.places == (ImageSpan(1, 1, 1),)
    for tokens, given, error in (
        ([image, image], pictures, "2 placeholders of images, but the processor's outputs are for 1"),
        ([image], {**pictures, "audio_values": torch.ones(1)}, "^audio_values: no output of the processor"),
        ([image, 1], {**pictures, "image_grid_thw": torch.tensor([[2, 2, 1]])}, "an image of 2 frames"),
        ([video], {"pixel_values_videos": torch.zeros(1, 1)}, "pixel_values_videos without video_grid_thw"),
        ([image], found, "the media of the sequence have 1 tokens|ends at token 2 of 1"),
        (
            [image, 1],
            found,
            "input_ids have placeholders: 1 of images; the media of the sequence have 1 tokens",
        ),
    ):
        with pytest.raises(McaError, match=error):
            sequence_media(torch.tensor(tokens), given, config)  # type: ignore[arg-type]
    text = replace(config, vision=None)
    with pytest.raises(McaError, match="a qwen3_vl model takes no media; pass text only"):
        sequence_media(ids, pictures, text)


def test_audio_of_a_model_without_an_audio_tower_is_refused() -> None:
    config = config_from_hf(tiny_vision.described("gemma4-31b"))
    clips = {"input_features": torch.zeros(1, 8, 8), "input_features_mask": torch.ones(1, 8)}
    with pytest.raises(McaError, match="this gemma4 model has no audio tower"):
        compute_image_features(torch.nn.Linear(1, 1), clips, config, [])


def test_a_version_of_transformers_without_the_class_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "MODEL_MAPPING", {})
    config = config_from_hf(tiny_vision.described("qwen2_audio"))
    with pytest.raises(McaError, match="has no model of its features alone; install a newer version"):
        vision_model(config, torch.float32)


@pytest.mark.parametrize("first", [True, False])
def test_each_stage_of_a_loop_that_sends_no_features_for_mtp_layers_raises(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "image_problems", lambda *_, **__: [])
    monkeypatch.setattr(media, "image_reach", lambda _: 0)
    model: Any = SimpleNamespace(
        pre_process=first,
        training=True,
        vision_model=None,
        config=SimpleNamespace(mtp_num_layers=1, sequence_parallel=False),
    )
    config: Any = SimpleNamespace(layout=SimpleNamespace(pp=2))
    inputs = media._ImageInputs(model, config)
    images = {"images": {}} if first else {}
    with pytest.raises(McaError, match="does not send features to the last stage"):
        inputs.before_chunk(model, (), {"feature_rows": torch.zeros(1, 2), **images})
    if not first:
        assert inputs.before_chunk(model, (), {}) == ((), {})
