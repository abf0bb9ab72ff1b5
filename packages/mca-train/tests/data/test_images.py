"""Rows with images become samples whose placeholders are as many as the images have tokens."""

import base64
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from drawn_images import MARKS, draw, image_token, processor
from image_samples import ANSWER, asked, load, placed, reader, text
from PIL import Image

from mca_config.errors import McaError
from mca_models.megatron.features.sequence_media import MediaJoiner
from mca_train.batching.collate import PadCollator, StepCollator
from mca_train.batching.packing import PackedDataset
from mca_train.batching.sampling import CountedSamples
from mca_train.config.arguments import DataArguments
from mca_train.data import image_blocks
from mca_train.data.image_files import open_image
from mca_train.data.media_tokens import image_tokens
from mca_train.data.medium_tokens import Grid
from mca_train.data.row_paths import RowPaths
from mca_train.tasks import TASKS
from mca_train.tasks.classify import Labels
from mca_train.tasks.load import load_tokenized

pytestmark = pytest.mark.usefixtures("own_cache")


def in_base64(folder):
    return base64.b64encode((folder / "wide.png").read_bytes()).decode()


FORMS = {
    "path": lambda folder: asked({"type": "image", "path": "wide.png"}, text("what?")),
    "image": lambda folder: asked({"type": "image", "image": str(folder / "wide.png")}, text("what?")),
    "base64": lambda folder: asked({"type": "image", "base64": in_base64(folder)}, text("what?")),
    "url": lambda folder: asked({"type": "image", "url": str(folder / "wide.png")}, text("what?")),
    "data-url": lambda folder: asked(
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(folder)}"}},
        text("what?"),
    ),
    "trl-parts": lambda folder: {**asked({"type": "image"}, text("what?")), "images": ["wide.png"]},
    "trl-text": lambda folder: {
        "prompt": [{"role": "user", "content": "what?"}],
        "completion": [ANSWER],
        "images": ["wide.png"],
    },
    "llama-factory": lambda folder: {
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}],
        "images": ["wide.png"],
    },
    "tag-in-part": lambda folder: {**asked(text("<image>what?")), "images": ["wide.png"]},
    "alpaca": lambda folder: {"instruction": "<image>what?", "output": "red", "images": ["wide.png"]},
    "qwen-parts": lambda folder: asked({"image": "wide.png"}, {"text": "what?"}),
    "responses": lambda folder: asked(
        {"type": "input_image", "image_url": str(folder / "wide.png")},
        {"type": "input_text", "text": "what?"},
    ),
    "llava": lambda folder: {
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}],
        "image": "wide.png",
    },
    "trl-one": lambda folder: {**asked(text("what?")), "image": "wide.png"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_makes_the_same_sample(form, tokenizer, folder):
    sample = load([FORMS[form](folder)], tokenizer, folder)[0]
    pads = MARKS[1] * 6
    said = (
        f"<|im_start|>user\n{MARKS[0]}{pads}{MARKS[2]}what?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    )
    assert tokenizer.decode(sample["input_ids"]) == said
    start = tokenizer("<|im_start|>user\n").input_ids
    assert placed(sample) == [(len(start) + 1, 2, 3)]
    learnt = sample["input_ids"][sample["labels"] != -100]
    assert tokenizer.decode(learnt) == "red<|im_end|>\n"
    made = sample["images"].tensors()
    expected = processor()(images=[Image.open(folder / "wide.png")], return_tensors="pt")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_rows_of_parquet_bring_their_images_as_bytes_which_are_not_decoded_early(tokenizer, folder, tmp_path):
    said = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    rows = {
        "conversations": [said, said],
        "images": [[str(folder / "small.png")], [str(folder / "wide.png")]],
    }
    features = datasets.Dataset.from_dict({"conversations": rows["conversations"]}).features
    features["images"] = datasets.List(datasets.Image())
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "rows.parquet")
    found = load_tokenized(
        TASKS["sft"],
        [str(tmp_path / "rows.parquet")],
        tokenizer,
        DataArguments(model_name_or_path="m"),
        images=reader(tokenizer, folder),
    )
    assert [placed(found[index])[0][1:] for index in range(2)] == [(2, 2), (2, 3)]
    assert found[1]["images"].tensors()["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_pixels_are_read_when_a_batch_is_made_and_the_row_is_named_then(tokenizer, folder):
    draw(folder / "later.png", 24, 16)
    samples = load([asked({"type": "image", "path": "later.png"}, text("what?"))], tokenizer, folder)
    whole = (folder / "later.png").read_bytes()
    (folder / "later.png").write_bytes(whole[:60])  # the header and a little more
    with pytest.raises(McaError, match=r"^train_file, row 0: image .*later.png cannot be read: "):
        samples[0]["images"].tensors()
    draw(folder / "later.png", 16, 16)
    with pytest.raises(McaError, match="had 2 x 3 tokens when rows were read, and has 2 x 2 now"):
        samples[0]["images"].tensors()


WRONG = {
    "row 0: 1 placeholder of images .* but 2 images": {
        **asked({"type": "image"}, text("?")),
        "images": ["small.png", "wide.png"],
    },
    "row 0: 2 placeholders of images .* but 1 image;": {
        "messages": [{"role": "user", "content": "<image><image>?"}, ANSWER],
        "images": ["small.png"],
    },
    "row 0: 0 placeholders of images .*, or parts of type image without a file. but 1 image": {
        **asked({"type": "image", "path": "small.png"}, text("?")),
        "images": ["small.png"],
    },
    "row 0: a part of type image has file, which is not read; put its file or data into one of image, ": asked(
        {"type": "image", "file": "small.png"}, text("?")
    ),
    "row 0: 1 placeholder of images .* but 0 images": {**asked({"type": "image"}, text("?")), "images": []},
    "row 0: image .*nowhere.png is not there": asked({"type": "image", "path": "nowhere.png"}),
    "row 0: image .*broken.png is no image that PIL can read": asked({"type": "image", "path": "broken.png"}),
    "row 0: an image in base64, 'no base64'..., cannot": asked({"type": "image", "base64": "no base64"}),
    "row 0: a qwen2_5_vl model does not support audio; remove it": asked({"audio": "a.wav"}, {"text": "?"}),
    "row 0: a part of a message has an image and a text": asked({"image": "small.png", "text": "?"}),
    "row 0: a qwen2_5_vl model does not support audio;": {**asked(text("?")), "audios": ["a.wav"]},
    "row 0: a qwen2_5_vl model does not support audio": {**asked(text("?")), "audio": "a.wav"},
    "row 0: has images in images and in image; set images_column to one of the two": {
        **asked({"type": "image"}, text("?")),
        "images": ["small.png"],
        "image": "wide.png",
    },
    "row 0: a turn of the user has <image>, .* .* no column images or image; set images_column .* plain text": {
        "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "red"}],
        "picture": "small.png",
    },
    "row 0: the text contains the image placeholder .*, but the row has no image": asked(text(MARKS[1])),
    "row 0: the chat template makes 2 placeholders .* of 1 image;": asked(
        {"type": "image", "path": "small.png"}, text(MARKS[1])
    ),
}


@pytest.mark.parametrize("reported", WRONG)
def test_what_is_wrong_with_a_row_is_told_in_one_line(reported, tokenizer, folder):
    with pytest.raises(McaError, match=f"^train_file, {reported}") as caught:
        load([WRONG[reported]], tokenizer, folder)
    assert "\n" not in str(caught.value)


def test_a_tag_is_text_next_to_typed_placeholders(tokenizer, folder):
    (sample,) = load(
        [{**asked({"type": "image"}, text("an <image> tag")), "images": ["wide.png"]}], tokenizer, folder
    )
    assert "an <image> tag" in tokenizer.decode(sample["input_ids"])
    assert len(placed(sample)) == 1


@pytest.mark.parametrize("column", [True, False])
def test_an_image_that_cannot_be_fetched_is_named_without_its_secrets(column, tokenizer, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    address = "https://me:SECRET@host/a.png?sig=SECRET"
    row = (
        {**asked({"type": "image"}), "images": [address]}
        if column
        else asked({"type": "image", "path": address})
    )
    with pytest.raises(
        McaError, match=r"^train_file, row 0: image: https://...@host/a.png needs the package"
    ) as caught:
        load([row], tokenizer, folder)
    assert "SECRET" not in str(caught.value)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to(os.devnull),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_waited_for(kind, tokenizer, tmp_path_factory, folder):
    special = tmp_path_factory.mktemp("s") / "x.png"  # a socket's path is short
    SPECIAL[kind](special)
    reported = rf"^train_file, row 0: image {special}: not a file but a "
    with pytest.raises(McaError, match=reported):
        load([asked({"type": "image", "path": str(special)})], tokenizer, folder)


@pytest.mark.parametrize(
    "row", [{**asked({"type": "image"}), "images": [""]}, asked({"type": "image", "path": ""})]
)
def test_an_empty_path_of_an_image_is_named_so(row, tokenizer, folder):
    with pytest.raises(McaError, match=r"^train_file, row 0: the path of an image is empty; name a file"):
        load([row], tokenizer, folder)


def test_images_that_are_too_large_or_too_long_are_refused(tokenizer, folder, monkeypatch):
    rows = [asked({"type": "image", "path": "large.png"})]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(McaError, match=r"row 0: image .*large.png is too large: more than 1,000 pixels"):
        load(rows, tokenizer, folder)
    draw(folder / "long.png", 900, 1)
    with pytest.raises(McaError, match=r"row 0: image .*long.png: an image of 900 x 1 pixels cannot be used"):
        load([asked({"type": "image", "path": "long.png"})], tokenizer, folder)


def test_images_lie_as_people_see_them(folder):
    turned = Image.open(folder / "wide.png")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif)
    found = open_image("turned.jpg", RowPaths(str(folder)))
    assert found.size() == (24, 16)
    assert found.pixels().size == (16, 24)


TRANSPARENT = {"RGBA": {}, "LA": {}, "L": {"transparency": 0}, "P": {"transparency": 0}, "RGB": {}}
"""Modes of a picture, and how a file says that its black is transparent, where not by a band."""


@pytest.mark.parametrize("mode", TRANSPARENT)
def test_what_is_transparent_is_white_as_for_the_image_processor(mode, tokenizer, folder):
    drawn = Image.new("RGBA", (24, 16), (0, 0, 0, 0))
    drawn.paste((200, 200, 200, 255), (4, 4, 20, 12))
    drawn.convert(mode).save(folder / "clear.png", **TRANSPARENT[mode])
    sample = load([asked({"type": "image", "path": "clear.png"}, text("?"))], tokenizer, folder)[0]
    expected = processor()(images=[Image.open(folder / "clear.png")], return_tensors="pt")
    assert torch.equal(sample["images"].tensors()["pixel_values"], expected["pixel_values"])
    corner = 0 if mode == "RGB" else 255
    assert open_image("clear.png", RowPaths(str(folder))).pixels().getpixel((0, 0)) == (
        corner,
        corner,
        corner,
    )


def test_models_and_kinds_that_take_no_images_say_so(tokenizer, folder):
    row = asked({"type": "image", "path": "small.png"}, text("?"))
    with pytest.raises(
        McaError, match="row 0: a part of a message is an image, which needs a model with a tower"
    ):
        load([row], tokenizer, folder, vision=False)
    with pytest.raises(
        McaError, match="row 0: a part of a message is an image, which needs a model with a tower"
    ):
        classes([{**row, "label": 1}], tokenizer, folder, vision=False)
    with pytest.raises(McaError, match=r"row 0: 0 placeholders of images .* but 1 image"):
        classes([{"text": "<image>?", "label": 1, "images": ["small.png"]}], tokenizer, folder)


def classes(rows, tokenizer, folder, **options):
    return load(rows, tokenizer, folder, kind="classify", arguments=Labels, num_labels=2, **options)


def test_rows_with_scores_have_the_images_of_other_kinds(tokenizer, folder):
    row = asked({"type": "image", "path": "wide.png"}, text("what?"))
    (plain,), (found,) = load([row], tokenizer, folder), classes([{**row, "label": 1}], tokenizer, folder)
    assert found["input_ids"].tolist() == plain["input_ids"].tolist()
    assert placed(found) == placed(plain)
    assert found["values"].tolist() == [1.0]


def test_pairs_that_images_make_too_long_are_left_out(tokenizer, folder, caplog):
    answers = {
        side: [{"role": "assistant", "content": said}] for side, said in (("chosen", "a"), ("rejected", "b"))
    }
    prompts = [
        [{"role": "user", "content": [{"type": "image", "path": name}]}]
        for name in ("large.png", "small.png")
    ]
    rows = [{"prompt": prompt, **answers} for prompt in prompts]
    whole = load(rows, tokenizer, folder, kind="reward")
    (longest, _), (shorter, _) = whole.lengths.tolist()
    assert longest > shorter
    (found,) = load(rows, tokenizer, folder, kind="reward", seq_length=longest - 1)
    assert len(found["chosen_input_ids"]) == shorter
    assert placed({"images": found["rejected_images"]}) == placed({"images": whole[1]["rejected_images"]})
    assert "1 of 2 rows do not have both answers whole" in caplog.text


def test_a_row_that_ends_within_an_image_is_left_out_and_counted(tokenizer, folder, caplog):
    image = {"type": "image", "path": "small.png"}
    answered = [{"role": "user", "content": [image]}, ANSWER, {"role": "user", "content": [image]}, ANSWER]
    rows = [{"messages": answered}, asked(text("?"))]
    whole = load(rows, tokenizer, folder)
    (_, _, _), (second, _, _) = placed(whole[0])
    cut = load(rows, tokenizer, folder, seq_length=second + 2)
    assert "1 of 2 rows end within an image" in caplog.text
    assert len(cut) == 1
    assert "images" not in cut[0]
    before = load(rows, tokenizer, folder, seq_length=second)
    assert placed(before[0]) == placed(whole[0])[:1]
    assert len(before[0]["images"].tensors()["image_grid_thw"]) == 1


def batch(samples, picked, **options):
    collator = StepCollator(collate=PadCollator(0), micro_batch_size=len(picked), **options)
    return collator(CountedSamples(samples).__getitems__(picked)).micro_batches[0]


@pytest.fixture(scope="module")
def mixed(tokenizer, folder):
    small, wide = ({"type": "image", "path": f"{name}.png"} for name in ("small", "wide"))
    return load(
        [asked(small, text("and"), wide, text("?")), asked(text("none")), asked(wide)], tokenizer, folder
    )


def test_a_micro_batch_has_rows_of_features_positions_and_pixels(mixed, tokenizer):
    sections = MediaJoiner(sections=True)
    made = batch(mixed, [0, 1, 2], images=sections)
    rows = made.feature_rows
    assert torch.equal(rows >= 0, made.input_ids == image_token(tokenizer))
    assert rows[rows >= 0].tolist() == [*range(16)]
    assert made.image_tokens == 16
    assert made.images["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 6]]
    assert made.sections.shape == (3, *made.input_ids.shape)
    assert torch.equal(made.sections[:, 1], made.position_ids[1].expand(3, -1))
    later = batch(mixed, [0, 1, 2], images=replace(sections, decodes=False))
    assert later.images is None
    assert later.feature_rows is None
    assert torch.equal(later.sections, made.sections)
    none = batch(mixed, [1], images=sections)
    assert none.sections is None
    assert none.images is None
    uncounted = batch(mixed, [0, ~2], images=sections)
    assert uncounted.image_tokens == 10
    assert len(uncounted.images["image_grid_thw"]) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_context_ranks_have_their_parts_of_rows_and_the_whole_packs_positions(packed, mixed, tokenizer):
    options = {"multiple": 4, "images": MediaJoiner(sections=True), "packed": packed}
    data = PackedDataset(mixed, 200, multiple=4) if packed else mixed
    picked = [0] if packed else [0, 1, 2]
    parts = [
        batch(data, picked, context_parallel_size=2, context_parallel_rank=rank, **options) for rank in (0, 1)
    ]
    found = [part.feature_rows[part.feature_rows >= 0] for part in parts]
    assert sorted(torch.cat(found).tolist()) == [*range(16)]
    assert all(len(rows) for rows in found)
    for part in parts:
        assert torch.equal(part.feature_rows >= 0, part.input_ids == image_token(tokenizer))
        assert part.image_tokens == 16
        assert part.sections.shape[1:] == ((1, part.cu_seqlens[-1]) if packed else part.input_ids.shape)
    if packed:
        assert torch.equal(parts[0].sections, parts[1].sections)


def test_sizes_are_told_by_the_processor(tokenizer, folder):
    known = reader(tokenizer, folder)
    tokens = image_tokens(known.config, known.directories, tokenizer)
    for height, width in ((16, 16), (5, 90), (64, 64), (37, 53)):
        image = Image.new("RGB", (width, height))
        _, high, wide = processor()(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert tokens.grid(height, width) == Grid(high // 2, wide // 2)
    assert Path(folder / "model").is_dir()


@pytest.mark.parametrize("first", ["text", "images"])
def test_blocks_have_images_if_one_file_has(monkeypatch, first):
    monkeypatch.setattr(image_blocks, "text_encoder", lambda *_: None)
    heads = sorted([{"text": "a"}, {"images": ["a.png"]}], key=lambda row: first not in row)
    rows = SimpleNamespace(heads=heads, order_description="rows")
    read = SimpleNamespace(has_images=lambda row: "images" in row)
    stream = image_blocks.ImageBlockStream(rows, (), read, SimpleNamespace(seq_length=16), "train_file")
    assert stream.has_images
