"""Locations of the media of a processor's outputs among the tokens of a sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron.features import processor_media
from mca_models.megatron.features.media_features import join_patches
from mca_models.megatron.features.processor_media import (
    _images,
    _Item,
    _locate,
    _placeholders,
    _require_silent,
    _spans,
)

IMAGE, VIDEO, AUDIO, START = 90, 91, 92, 93


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    known = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
    monkeypatch.setattr(processor_media, "placeholders", lambda fields: known)
    family = SimpleNamespace(vision=SimpleNamespace(image_tokens="row_column_tiles", tokens_together=None))
    monkeypatch.setattr(processor_media, "get_family", lambda kind: family)
    fields = {"audio_token_id": AUDIO, "audio_start_token_id": START}
    return SimpleNamespace(vision_fields=fields, model_type="model", mrope=None, family=family)


def test_items_take_the_placeholders_of_their_medium_in_order(config: Any) -> None:
    ids = torch.tensor([1, IMAGE, IMAGE, VIDEO, IMAGE, 2, AUDIO, VIDEO])
    items = {
        "image": [_Item({"n": "first"}, 2), _Item({"n": "second"}, 1)],
        "audio": [_Item({"n": "clip"}, 1)],
    }
    located = _locate(ids, items, config)
    assert [(each.start, each.rows * each.columns, each.medium) for each in located.places] == [
        (1, 2, "image"),
        (4, 1, "image"),
        (6, 1, "audio"),
    ]
    assert [each["n"] for each in located.parts] == ["first", "second", "clip"]
    split = _locate(ids, {"image": [_Item({}, 3)]}, config).places
    assert [(each.start, each.columns) for each in split] == [(1, 2), (4, 1)], "one location for each run"
    for tokens in (2, 4):
        with pytest.raises(McaError, match=f"have 3 placeholders of images, .* outputs are for {tokens};"):
            _locate(ids, {"image": [_Item({}, tokens)]}, config)
    with pytest.raises(McaError, match="too small for one feature"):
        _locate(ids, {"image": [_Item({}, 3), _Item({}, 0)]}, config)


@pytest.mark.parametrize(("tokens", "more"), [("word_marks", [94, 95]), ("row_column_tiles", [])])
def test_marks_have_features_where_images_are_words(tokens: str, more: list[int], config: Any) -> None:
    config.vision_fields["visual_indicator_token_ids"] = [94, 95]
    config.family.vision.image_tokens = tokens
    assert _placeholders(config) == {"image": [IMAGE, *more], "video": [VIDEO], "audio": [AUDIO]}


@pytest.mark.parametrize(
    ("ids", "is_silent"),
    [
        ([VIDEO, VIDEO], True),
        ([AUDIO, 1, VIDEO, VIDEO, 1, START], True),
        ([AUDIO, VIDEO, VIDEO, 1], False),
        ([START, VIDEO, VIDEO, 1], False),
        ([1, VIDEO, VIDEO, AUDIO], False),
        ([VIDEO, VIDEO, 1, AUDIO], True),
    ],
)
def test_a_video_next_to_its_sound_is_an_error(ids: list[int], is_silent: bool, config: Any) -> None:
    where = [index for index, token in enumerate(ids) if token == VIDEO]
    if is_silent:
        _require_silent(torch.tensor(ids), where, config)
        return
    with pytest.raises(McaError, match="use_audio_in_video"):
        _require_silent(torch.tensor(ids), where, config)


def test_an_item_with_rows_and_columns_is_in_one_run() -> None:
    span = processor_media.ImageSpan(0, 2, 2)
    assert [each.start for each in _spans([5, 6, 7, 8], _Item({}, 4, span), "image")] == [5]
    with pytest.raises(McaError, match="the 4 placeholders of one image are not next to each other"):
        list(_spans([5, 6, 8, 9], _Item({}, 4, span), "image"))


def test_tiles_of_a_processor_are_images_of_one_tile(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[Any] = []
    monkeypatch.setattr(
        processor_media, "split_images", lambda images, config: split.append(images) or iter([])
    )
    pixels = torch.arange(72.0).view(1, 6, 3, 2, 2)
    masks = torch.ones(1, 6, 2, 2)
    assert list(_images({"pixel_values": pixels, "pixel_attention_mask": masks}, config)) == []
    (images,) = split
    assert images.keys() == {"pixel_values"}
    assert torch.equal(images["pixel_values"], pixels[0][:, None])
    masks[0, 5, 1, 1] = 0
    with pytest.raises(McaError, match="pixel_attention_mask marks padding"):
        list(_images({"pixel_values": pixels, "pixel_attention_mask": masks}, config))
    config.family.vision.image_tokens, config.family.vision.tokens_together = "grid", "together"
    list(_images({"pixel_values": pixels, "image_sizes": torch.zeros(3, 2)}, config))
    assert split[1]["batch_num_images"].tolist() == [3, 3, 3]


def test_patches_next_to_each_other_are_split_by_image(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[Any] = []
    monkeypatch.setattr(
        processor_media, "split_images", lambda images, config: split.append(images) or iter([])
    )
    patches, sizes = torch.arange(7 * 12.0).view(7, 3, 2, 2), torch.tensor([[1, 3], [2, 2]])
    next_to_each_other = torch.cat([*patches], -1)[None]
    config.family.vision.image_tokens, config.family.vision.video_tokens = "numbered_slices", "slices"
    list(_images({"pixel_values": next_to_each_other, "target_sizes": sizes}, config))
    videos = {"pixel_values_videos": next_to_each_other, "target_sizes_videos": sizes}
    list(processor_media._videos(videos, config))
    for images in split:
        assert torch.equal(images["pixel_values"], patches)
        assert torch.equal(images["target_sizes"], sizes)
    assert len(split) == 2
    assert torch.equal(join_patches(patches), next_to_each_other)
