"""Samples of mca from rows and batches in the formats of LLaMA-Factory."""

from types import SimpleNamespace

import pytest
import torch

from mca_config.errors import McaError
from mca_models.media import ImageSpan, positions
from mca_train.batching.packing import PackedDataset, sequence_lengths
from mca_train.clients.sample_media import ROLL, VERL, BatchMedia
from mca_train.clients.samples import SampleMaker, client_samples

IMAGE, VIDEO = 9, 8


def config(model_type):
    return SimpleNamespace(
        model_type=model_type,
        vision_fields={"image_token_id": IMAGE, "video_token_id": VIDEO},
        hf_config={"vision_config": {"spatial_merge_size": 2}},
    )


def row(*tokens, **others):
    return {"input_ids": [*tokens], "labels": [*tokens], "attention_mask": [1] * len(tokens), **others}


def collate(features):
    """Pad shifted rows as LLaMA-Factory's wrapper and collator do."""
    (feature,) = features
    sides = ("chosen_", "rejected_") if "chosen_input_ids" in feature else ("",)
    width = 8
    batch = {}
    for name, padding in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        rows = []
        for side in sides:
            values = list(feature[side + name])
            values = {"labels": values[1:], "input_ids": values[:-1]}.get(name, values)
            if name == "attention_mask" and not side:
                values = values[:-1]
            rows.append(values + [padding] * (width - len(values)))
        batch[name] = torch.tensor(rows)
    return batch | feature.get("extra", {})


def make(collate=collate, model_type="qwen2_5_vl"):
    return SampleMaker(collate=collate, config=config(model_type))


def test_a_row_becomes_a_sample_without_padding():
    sample = make()(row(1, 2, 3, 4))
    assert sample["input_ids"].tolist() == [1, 2, 3]
    assert sample["labels"].tolist() == [2, 3, 4]


def test_a_pair_becomes_a_pair():
    pair = {
        f"{side}_{name}": value
        for side, values in (("chosen", row(1, 2, 3)), ("rejected", row(4, 5, 6, 7)))
        for name, value in values.items()
    }
    sample = make()(pair)
    assert sample["chosen_input_ids"].tolist() == [1, 2]
    assert sample["rejected_labels"].tolist() == [5, 6, 7]


def test_a_pack_becomes_its_sequences():
    packed = row(1, 2, 3, 4, 5, 6) | {"attention_mask": [1, 1, 1, 2, 2, 2]}
    first, second = make()(packed)
    assert (first["input_ids"].tolist(), second["input_ids"].tolist()) == ([1, 2, 3], [4, 5])
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([2, 3, 4], [5, 6])


def with_image(columns=2, **others):
    """A row with an image of 2 x ``columns`` merged patches after its first token, and its batch."""
    tokens = [1, *[IMAGE] * (2 * columns), 2, 3]
    pixels = torch.arange(8 * columns, dtype=torch.float32)[:, None]
    return row(*tokens, extra={"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), **others})


def test_images_are_located_and_their_positions_compared():
    span = ImageSpan(1, 2, 2)
    places = torch.from_numpy(positions(8, (span,)))[:, None]
    sample = make()(with_image(position_ids=places))
    assert sample["images"].places == (span,)
    assert sample["images"].tensors()["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert sample["images"].tensors()["pixel_values"].shape == (16, 1)
    with pytest.raises(McaError, match="position_ids that mca does not have"):
        make()(with_image(position_ids=places + torch.arange(8)))


def test_an_image_that_is_cut_off_raises_an_error():
    cut = with_image()
    cut |= {name: cut[name][:4] for name in ("input_ids", "labels", "attention_mask")}
    with pytest.raises(McaError, match="image is cut off; raise cutoff_len, or lower image_max_pixels"):
        make()(cut)


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        (ROLL, "raise prompt_length and sequence_length, or lower data_args.image_max_pixels"),
        (VERL, "raise data.max_prompt_length, .* or lower max_pixels of the images in the dataset"),
    ],
)
def test_an_image_that_is_cut_off_names_the_options_of_the_program(program, remedy):
    media = BatchMedia(
        {"pixel_values": torch.ones(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])},
        config("qwen2_5_vl"),
        program,
    )
    with pytest.raises(McaError, match=f"{program.name}: a sample's image is cut off; {remedy}"):
        media.take(torch.tensor([1, IMAGE, 2]), None)


def test_an_image_without_any_token_left_raises_an_error():
    cut = with_image() | {"images": ["a.png"]}
    cut |= {name: cut[name][:1] * 3 for name in ("input_ids", "labels", "attention_mask")}
    with pytest.raises(McaError, match="image is cut off; raise cutoff_len"):
        make()(cut)
    assert "images" not in make()({**cut, "images": []})  # the white image that the collator adds


def test_image_tokens_without_an_image_raise_an_error():
    with pytest.raises(McaError, match="more image tokens than its images need"):
        make()(row(1, IMAGE, IMAGE, 2))


def with_video(tokens, frames, spans):
    """A row with ``frames`` frames of one merged patch; ``spans`` are its locations."""
    batch = {
        "pixel_values_videos": torch.arange(4 * frames, dtype=torch.float32)[:, None],
        "video_grid_thw": torch.tensor([[frames, 2, 2]]),
        "position_ids": torch.from_numpy(positions(8, spans))[:, None],
        "second_per_grid_ts": [1.0],
    }
    return row(*tokens, extra=batch, videos=["a.mp4"])


@pytest.mark.parametrize(
    ("model_type", "tokens", "spans"),
    [
        ("qwen2_5_vl", [1, VIDEO, VIDEO, VIDEO, 2, 3], (ImageSpan(1, 1, 1, 3, interval=4.0),)),
        (
            "qwen3_vl",
            [1, VIDEO, 5, VIDEO, 6, VIDEO, 2, 3],
            (ImageSpan(1, 1, 1), ImageSpan(3, 1, 1), ImageSpan(5, 1, 1)),
        ),
    ],
)
def test_videos_are_located_by_the_rule_of_the_family(model_type, tokens, spans):
    images = make(model_type=model_type)(with_video(tokens, 3, spans))["images"]
    assert images.places == spans
    inputs = images.tensors()
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]] * 3
    assert inputs["pixel_values"].flatten().tolist() == list(range(12))


def test_images_and_videos_are_taken_in_the_order_of_their_tokens():
    spans = (ImageSpan(1, 1, 1, 2, interval=1.0), ImageSpan(3, 1, 1))
    mixed = with_video([1, VIDEO, VIDEO, IMAGE, 2, 3], 2, spans)
    mixed["extra"] |= {"pixel_values": torch.full((4, 1), -1.0), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    images = make()(mixed)["images"]
    assert images.places == spans
    assert images.tensors()["pixel_values"].flatten().tolist() == [*range(8), *[-1] * 4]


def test_frames_that_are_cut_off_raise_an_error():
    cut = with_video([1, VIDEO, 2, 3], 3, ())
    with pytest.raises(McaError, match="video is cut off; raise cutoff_len, or lower video_max_pixels"):
        make()(cut)
    del cut["extra"]["position_ids"]
    with pytest.raises(McaError, match="LLaMA-Factory's batch has no position_ids, which give the times"):
        make()(cut)


def test_padding_on_the_left_and_unknown_inputs_raise_errors():
    def left(features):
        return {name: values.flip(1) for name, values in collate(features).items()}

    with pytest.raises(McaError, match="pads on the left; set padding_side"):
        make(left)(row(1, 2, 3))
    with pytest.raises(
        McaError, match=r"returned input_features; expected text.*use mca-train sft for audio"
    ):
        make()(row(1, 2, 3, extra={"input_features": torch.zeros(1)}))


def test_images_without_grids_raise_an_error():
    pixels = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    with pytest.raises(McaError, match="images of gemma3 are not supported with LLaMA-Factory"):
        make(model_type="gemma3")(row(1, IMAGE, IMAGE, 2, extra=pixels, images=["a.png"]))
    assert "images" not in make(model_type="gemma3")(row(1, 2, 3, extra=pixels))  # added by the collator


class Rows(list):
    """A dataset in memory, as `datasets.Dataset`."""

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)


def test_lengths_are_those_of_the_samples():
    samples = client_samples(Rows([row(1, 2, 3), row(1, 2, 3, 4)]), make())
    assert sequence_lengths(samples).tolist() == [[len(samples[index]["input_ids"])] for index in (0, 1)]


def test_rows_with_packing_parameters_are_packs():
    rows = Rows([row(1, 2, 3, 4, packing_params={}) | {"attention_mask": [1, 1, 2, 2]}])
    packs = client_samples({"name": rows}, make())["name"]
    assert isinstance(packs, PackedDataset)
    assert [sample["input_ids"].tolist() for sample in packs[0]] == [[1, 2], [3]]
    assert (packs.fill.packs, packs.fill.tokens) == (1, 3)
