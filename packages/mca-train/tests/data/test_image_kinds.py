"""Images that are not cut into one grid: tiles, rows with marks, as many tokens for every image; as processors do."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from drawn_images import draw
from image_kinds import (
    KINDS,
    SIDE,
    SIZES,
    MiniCPM,
    gemma4,
    idefics,
    lfm2_vl,
    llama4,
    llava_next,
    llava_onevision,
    minicpm,
    mistral3,
    ovis2,
)
from PIL import Image
from tokenizers_for_tests import byte_tokenizer
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mca_config.errors import McaError, UsageError
from mca_models.megatron.features.media_features import split_patches
from mca_models.megatron.features.sequence_media import MediaJoiner
from mca_train.batching.collate import PadCollator, StepCollator
from mca_train.batching.sampling import CountedSamples
from mca_train.config.arguments import DataArguments
from mca_train.data.image_rows import ImageReader
from mca_train.data.image_tiles import TileRowTokens, WordMarkTokens
from mca_train.data.media_tokens import MediaTokens, image_tokens
from mca_train.data.medium_tokens import Grid, MediaContext, expecting, load_processor
from mca_train.data.patch_grids import LineTokens
from mca_train.data.video_files import VideoFacts
from mca_train.data.video_tokens import PooledVideoTokens, SliceVideoTokens
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized

data_arguments = partial(DataArguments, model_name_or_path="m")


@pytest.fixture(params=KINDS)
def made(request, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, expected = KINDS[request.param]()
    kind.processor.save_pretrained(tmp_path / "model")
    for name, size in SIZES.items():
        draw(tmp_path / f"{name}.png", *size)
    return kind, expected, tmp_path


def load(kind, folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = ImageReader(config=kind.config, directories=(folder / "model",))
    given = data_arguments(seq_length=4096)
    return load_tokenized(TASKS["sft"], [str(folder / "rows.jsonl")], kind.tokenizer, given, images=images)


def row(question, *names):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "images": [f"{name}.png" for name in names]}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_an_image_of_ovis_2_has_the_tokens_of_all_its_tiles(rows, columns):
    made = object.__new__(WordMarkTokens)
    made._length, made.token, made._marks = 4, 9, list(range(5))
    tiles = rows * columns
    assert made.ids(made._tiles(rows, columns)).count(9) == 4 * (tiles + (tiles > 1))


@pytest.mark.parametrize("side", [*range(7, 11), 16, 17, 31, 32])
def test_a_started_patch_of_mistral_3_is_a_whole_one(side):
    made = object.__new__(LineTokens)
    made._side, made.processor = 8, PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8)
    for height, width in ((side, 8), (8, side)):
        pixels = np.zeros((height, width, 3), np.uint8)
        found = made.processor(images=[pixels], return_tensors="pt", patch_size={"height": 8, "width": 8})
        ((high, wide),) = found["image_sizes"].tolist()
        assert made._computed(height, width) == Grid(high // 8, wide // 8)


def test_tokens_and_pixels_are_those_of_the_familys_own_processor(made):
    kind, expected, folder = made
    sample = load(kind, folder, row("<image>and <image>\n<image>?", *SIZES))[0]
    text = "<|im_start|>user\n@and @\n@?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    ids, pixels = expected(text, [Image.open(folder / f"{name}.png").convert("RGB") for name in SIZES])
    assert sample["input_ids"].tolist() == ids
    found = sample["images"].tensors()
    assert found.keys() == pixels.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(pixels[name])) for name in pixels)
    placeholder = sample["input_ids"] == kind.tokenizer.convert_tokens_to_ids(
        {
            "internvl": "<IMG_CONTEXT>",
            "qianfan_ocr": "<IMG_CONTEXT>",
            "got_ocr2": "<imgpad>",
            "glm_ocr": "<|image|>",
            "glmga": "<|image|>",
            "mistral3": "[IMG]",
            "lighton_ocr": "<|image_pad|>",
            "aya_vision": "<|IMG_PATCH|>",
            "gemma3": "<image_soft_token>",
            "gemma4": "<|image|>",
            "gemma4_unified": "<|image|>",
            "llava": "<image>",
            "vipllava": "<image>",
            "llava_next": "<image>",
            "llava_onevision": "<image>",
            "idefics3": "<image>",
            "smolvlm": "<image>",
            "lfm2_vl": "<image>",
            "minicpmv4_6": "<|image_pad|>",
            "ovis2": "<IMG_ATOM>",
            "llama4": "<|patch|>",
            "kimi_k25": "<|media_pad|>",
            "deepseek_vl": "<image_placeholder>",
        }[kind.config.model_type]
    )
    if kind.config.model_type == "ovis2":  # its marks have features too
        placeholder |= torch.isin(
            sample["input_ids"], torch.tensor(kind.config.vision_fields["visual_indicator_token_ids"])
        )
    reported = torch.zeros_like(placeholder)
    for place in sample["images"].places:
        reported[place.start : place.start + place.tokens] = True
    assert torch.equal(placeholder, reported)
    assert kind.tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == "red<|im_end|>\n"


def test_a_batch_joins_images_of_several_rows(made):
    kind, _, folder = made
    samples = load(kind, folder, row("<image>?", "wide"), row("none?"), row("<image>?", "tall"))
    images = MediaJoiner(bidirectional="gemma" in kind.config.model_type)
    collator = StepCollator(collate=PadCollator(0), micro_batch_size=3, images=images)
    (batch,) = collator(CountedSamples(samples).__getitems__([0, 1, 2])).micro_batches
    rows = batch.feature_rows
    assert rows[rows >= 0].tolist() == [*range(batch.image_tokens)]
    assert not (rows[1] >= 0).any()
    apart = [samples[index]["images"].tensors()["pixel_values"] for index in (0, 2)]
    assert len(batch.images["pixel_values"]) == sum(map(len, apart))
    if "image_position_ids" in batch.images:
        count = (batch.images["image_position_ids"] >= 0).all(-1).sum(1)
        assert count.tolist() == [each.shape[1] for each in apart] and len(set(count.tolist())) > 1
    if images.bidirectional:
        positions = torch.arange(rows.shape[1])
        assert torch.equal(batch.attention_ends[1], positions + 1)
        (place,) = samples[0]["images"].places
        end = place.start + place.tokens
        assert batch.attention_ends[0, place.start : end].tolist() == [end] * place.tokens
        others = (rows[0] < 0).nonzero()[:, 0]
        assert torch.equal(batch.attention_ends[0, others], others + 1)


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (24, 50), (70, 70), (120, 30)])
def test_the_only_image_of_a_row_is_cut_in_llava_onevision(size, tmp_path):
    kind, expected = llava_onevision()
    kind.processor.save_pretrained(tmp_path / "model")
    draw(tmp_path / "one.png", *size)
    sample = load(kind, tmp_path, row("<image>?", "one"))[0]
    text = "<|im_start|>user\n@?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    ids, pixels = expected(text, [Image.open(tmp_path / "one.png").convert("RGB")])
    assert sample["input_ids"].tolist() == ids
    found = sample["images"].tensors()
    assert found.keys() == pixels.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(pixels[name])) for name in pixels)
    assert found["pixel_values"].shape[1] > 2


def test_a_tokenizer_without_the_marks_is_told(tmp_path, monkeypatch):
    kind, _ = mistral3()
    kind.processor.save_pretrained(tmp_path / "model")
    draw(tmp_path / "small.png", 16, 16)
    kind.tokenizer = byte_tokenizer(kind.tokenizer.chat_template)
    with pytest.raises(McaError, match=r"the tokenizer has no token \[IMG_BREAK\], \[IMG_END\]"):
        load(kind, tmp_path, row("<image>?", "small"))


def test_a_processor_is_found_where_transformers_exports_none_without_torchvision(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ImportError("requires the Torchvision library")

    PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers, "AutoImageProcessor", SimpleNamespace(from_pretrained=refuse))
    assert isinstance(load_processor([tmp_path], "image"), PixtralImageProcessorPil)


@pytest.mark.parametrize("tile", [16, 24])
def test_images_of_any_size_have_the_tiles_of_lfm2_vl(tile, tmp_path):
    kind, _ = lfm2_vl()
    kind.processor.tile_size = tile
    kind.processor.save_pretrained(tmp_path)
    tokens = image_tokens(kind.config, (tmp_path,), kind.tokenizer)
    found = set()
    for height, width in itertools.product((5, 8, 16, 17, 31, 40, 48, 65), repeat=2):
        pixels = [np.zeros((height, width, 3), np.uint8)]
        made = kind.processor(images=pixels, return_row_col_info=True, return_tensors="pt")
        grid, (now,) = tokens.grid(height, width), tokens._output_grids(made.data)
        assert (grid, grid.tile_columns) == (now, now.tile_columns), (height, width)
        found.add((grid.tile_rows, grid.tile_columns))
    assert len(found) > 4


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_images_of_any_size_have_the_slices_of_minicpm(mode, tmp_path):
    kind, _ = minicpm(mode)
    kind.processor.save_pretrained(tmp_path)
    tokens = image_tokens(kind.config, (tmp_path,), kind.tokenizer)
    found = set()
    for height, width in itertools.product((5, 16, 17, 24, 31, 48, 65), repeat=2):
        pixels = [np.zeros((height, width, 3), np.uint8)]
        made = kind.processor(images=pixels, downsample_mode=mode, return_tensors="pt")
        grid, (now,) = tokens.grid(height, width), tokens._output_grids(made.data)
        assert (grid, grid.tile_columns, grid.tile_tokens) == (now, now.tile_columns, now.tile_tokens)
        found.add((grid.tile_rows, grid.tile_columns))
    assert {(0, 0), (1, 2), (2, 1), (2, 3)} <= found


def test_processors_that_minicpm_cannot_use_raise_one_error(tmp_path):
    kind, _ = minicpm()
    kind.processor.do_resize = False
    kind.processor.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"expected MiniCPMV4_6ImageProcessor .* with do_resize true"):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)


def test_a_processor_without_what_a_family_needs_is_named():
    expected = r"^SimpleNamespace: this processor is not supported for F; expected P in preprocessor_config.json, or Q$"
    with (
        pytest.raises(UsageError, match=expected),
        expecting(SimpleNamespace(), "F", "P", ", or Q") as source,
    ):
        assert source.SimpleNamespace is SimpleNamespace
        source.resize  # noqa: B018


def test_images_of_minicpm_have_no_numbers_where_its_processor_writes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, expected = minicpm(use_image_id=False)
    kind.processor.save_pretrained(tmp_path / "model")
    draw(tmp_path / "wide.png", 40, 16)
    sample = load(kind, tmp_path, row("<image>?", "wide"))[0]
    text = "<|im_start|>user\n@?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    ids, _ = expected(text, [Image.open(tmp_path / "wide.png").convert("RGB")])
    assert sample["input_ids"].tolist() == ids
    assert "<image_id>" not in kind.tokenizer.decode(ids)


@pytest.mark.parametrize("resized", [True, False])
def test_images_of_any_size_have_the_tiles_of_idefics(resized, tmp_path):
    kind, _ = idefics()
    kind.processor.do_resize = resized
    kind.processor.save_pretrained(tmp_path)
    tokens = image_tokens(kind.config, (tmp_path,), kind.tokenizer)
    for height, width in itertools.product((5, 8, 16, 17, 31, 40, 48, 65), repeat=2):
        made = kind.processor(images=[np.zeros((height, width, 3), np.uint8)], return_row_col_info=True)
        grid = tokens.grid(height, width)
        assert grid == tokens._output_grids(made.data)[0], (height, width)
        assert grid.rows == len(made["pixel_values"][0])


@pytest.mark.parametrize("covering", [True, False])
def test_images_of_any_size_have_the_tiles_of_ovis2(covering, tmp_path):
    kind, _ = ovis2(use_covering_area_grid=covering)
    kind.processor.save_pretrained(tmp_path)
    tokens = image_tokens(kind.config, (tmp_path,), kind.tokenizer)
    found = set()
    for height, width in itertools.product((5, 16, 17, 31, 40, 48, 65), repeat=2):
        made = kind.processor([np.zeros((height, width, 3), np.uint8)], return_tensors="pt")
        grid = tokens.grid(height, width)
        assert grid == tokens._output_grids(made.data)[0], (height, width)
        assert grid.rows == len(made["pixel_values"])
        found.add(made["grids"].tolist()[0][0])
    assert len(found) > 3
    own = tokens.processor
    for crops, most, is_cut in ((True, 2, True), (True, 1, False), (False, 6, False)):
        own.crop_to_patches, own.max_patches = crops, most
        grid = tokens._computed(48, 16)
        assert (grid.rows, grid.tile_rows) == (3 if is_cut else 1, 1 if covering or not is_cut else 2)
    kind.config.vision_fields["visual_indicator_token_ids"] = [1, 2]
    with pytest.raises(UsageError, match=r"visual_indicator_token_ids is \[1, 2\]; expected \[\d+, "):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)


def test_other_sizes_of_tiled_images_than_the_models_are_refused(tmp_path):
    kind, _ = llava_next()
    kind.processor.save_pretrained(tmp_path)
    kind.config.vision_fields["image_grid_pinpoints"] = [[16, 32]]
    with pytest.raises(UsageError, match=r"image_grid_pinpoints is .* but the model's .*\[\[16, 32\]\]"):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)


def test_images_whose_marks_are_not_known_are_refused_by_name():
    config = SimpleNamespace(model_type="minimax_m3_vl", vision_fields={})
    with pytest.raises(
        UsageError, match=r"minimax_m3_vl are not supported in rows.*remove the images from the rows"
    ):
        image_tokens(config, (), None)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_frames_of_gemma4_are_behind_their_minutes_and_seconds(model_type, tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    from drawn_videos import write

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, _ = gemma4(model_type)
    for processor in (kind.processor, kind.videos):
        processor.save_pretrained(tmp_path / "model")
    write(tmp_path / "long.mp4", 70, 1)
    draw(tmp_path / "wide.png", *SIZES["wide"])
    turns = [{"role": "user", "content": "<image>then <video>?"}, {"role": "assistant", "content": "red"}]
    sample = load(kind, tmp_path, {"messages": turns, "images": ["wide.png"], "videos": ["long.mp4"]})[0]
    with av.open(str(tmp_path / "long.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    right = kind.whole(
        text=["<|im_start|>user\n<|image|>then <|video|>?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"],
        images=[[Image.open(tmp_path / "wide.png").convert("RGB")]],
        videos=[frames],
        video_metadata=[{"total_num_frames": 70, "fps": 1.0}],
        do_sample_frames=True,
        return_tensors="pt",
    )
    assert kind.tokenizer.decode(sample["input_ids"]) == kind.tokenizer.decode(right["input_ids"][0])
    assert "01:07 <|image><|video|>" in kind.tokenizer.decode(sample["input_ids"])
    found = sample["images"].tensors()
    assert len(found["pixel_values"]) == len(sample["images"].places) == 33
    for medium, own, suffix in (("image", slice(1), ""), ("video", slice(1, 33), "_videos")):
        positions = right[f"{medium}_position_ids"]
        most = int((positions >= 0).all(-1).sum(1).max())
        assert torch.equal(found["pixel_values"][own, :most], right[f"pixel_values{suffix}"][:, :most])
        assert torch.equal(found["image_position_ids"][own, :most], positions[:, :most])
        assert (found["image_position_ids"][own, most:] == -1).all()


@pytest.mark.parametrize("wanted", [4, None])
def test_frames_of_llava_onevision_end_with_one_token(wanted, tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    from drawn_videos import write
    from transformers.models.llava_onevision.video_processing_llava_onevision import (
        LlavaOnevisionVideoProcessor,
    )

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, _ = llava_onevision()
    kind.tokenizer.add_tokens(["<video>"], special_tokens=True)
    kind.config.vision_fields["video_token_index"] = kind.tokenizer.convert_tokens_to_ids("<video>")
    kind.tokenizer.chat_template = kind.tokenizer.chat_template.replace(
        "{% else %}{{ part['text'] }}",
        "{% elif part['type'] == 'video' %}{{ '<video>' }}{% else %}{{ part['text'] }}",
    )
    videos = LlavaOnevisionVideoProcessor(size=SIDE, num_frames=wanted)
    for processor in (kind.processor, videos):
        processor.save_pretrained(tmp_path / "model")
    write(tmp_path / "clip.mp4", 9, 4)
    draw(tmp_path / "wide.png", *SIZES["wide"])
    turns = [{"role": "user", "content": "<image>then <video>?"}, {"role": "assistant", "content": "red"}]
    sample = load(kind, tmp_path, {"messages": turns, "images": ["wide.png"], "videos": ["clip.mp4"]})[0]
    with av.open(str(tmp_path / "clip.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    kind.tokenizer.video_token, kind.tokenizer.video_token_id = (
        "<video>",
        kind.config.vision_fields["video_token_index"],
    )
    whole = LlavaOnevisionProcessor(
        kind.processor,
        kind.tokenizer,
        videos,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )
    right = whole(
        text=["<|im_start|>user\n<image>then <video>?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"],
        images=[[Image.open(tmp_path / "wide.png").convert("RGB")]],
        videos=[frames],
        video_metadata=[{"total_num_frames": 9, "fps": 4.0}],
        do_sample_frames=True,
        **({} if wanted else {"fps": 2.0}),
        return_tensors="pt",
    )
    assert sample["input_ids"].tolist() == right["input_ids"][0].tolist()
    found, taken = sample["images"].tensors(), right["pixel_values_videos"].shape[1]
    assert taken == 4
    assert found["batch_num_images"].tolist() == [1, -taken]
    assert torch.equal(found["pixel_values"][:1, : right["pixel_values"].shape[1]], right["pixel_values"])
    assert torch.equal(found["pixel_values"][1:, :taken], right["pixel_values_videos"])
    image, video = sample["images"].places
    assert video.tokens == 4 * 4 + 1 and video.start == image.start + image.tokens + len("then ")


def test_a_clip_with_fewer_frames_than_gemma4_takes_is_seen_as_a_whole():
    kind, _ = gemma4()
    context = MediaContext(kind.videos, 1, kind.config, kind.tokenizer)
    tokens = PooledVideoTokens(context, data_arguments())
    grid = tokens.grid(VideoFacts(5, 2.0, 16, 24))
    assert (grid.frames, grid.times) == (5, (0.0, 0.5, 1.0, 1.5, 2.0))
    few = PooledVideoTokens(context, data_arguments(video_max_frames=4))
    assert few.grid(VideoFacts(8, 2.0, 16, 24)).times == (0.0, 1.0, 2.0, 3.0)


def test_images_longer_than_the_window_of_gemma4_unified_are_refused(tmp_path):
    kind, _ = gemma4("gemma4_unified")
    kind.config.attention.window_size = 64
    kind.processor.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"max_soft_tokens is 70, more than the sliding window.*64 tokens"):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)


@pytest.mark.parametrize(
    ("frames", "together"), [((), False), ((0,), True), ((2,), False), ((-1, 0), True), ((0, 2), True)]
)
def test_images_of_a_sequence_are_sized_together_next_to_other_media(frames, together):
    grids = [Grid(2, 3, frames=count) for count in frames]
    images = SimpleNamespace(in_sequence=lambda found: ["together", *found])
    found = MediaTokens.in_sequence(SimpleNamespace(_images=images), grids)
    assert found == (["together", *grids] if together else grids)


def minicpm_with_videos(folder, monkeypatch):
    """Return MiniCPM-V and its video processor, both saved in ``folder``."""
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    kind, _ = minicpm()
    kind.tokenizer.chat_template = kind.tokenizer.chat_template.replace(
        "{% else %}{{ part['text'] }}",
        "{% elif part['type'] == 'video' %}{{ '<|video_pad|>' }}{% else %}{{ part['text'] }}",
    )
    videos = MiniCPMV4_6VideoProcessor(scale_resolution=16, patch_size=2, max_slice_nums=6)
    for processor in (kind.processor, videos):
        processor.save_pretrained(folder / "model")
    return kind, videos


@pytest.mark.parametrize("size", [(16, 16), (40, 24)])
def test_frames_of_minicpm_are_images_with_slices(size, tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    pytest.importorskip("torchvision")
    from drawn_videos import write

    kind, videos = minicpm_with_videos(tmp_path, monkeypatch)
    write(tmp_path / "clip.mp4", 9, 4, *size)
    draw(tmp_path / "wide.png", *SIZES["wide"])
    turns = [
        {"role": "user", "content": "<video>, <image>then <video>?"},
        {"role": "assistant", "content": "red"},
    ]
    given = {"messages": turns, "images": ["wide.png"], "videos": ["clip.mp4"] * 2}
    sample = load(kind, tmp_path, given)[0]
    with av.open(str(tmp_path / "clip.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    right = MiniCPM(kind.processor, videos, kind.tokenizer)(
        text=[
            "<|im_start|>user\n<|video_pad|>, <|image_pad|>then <|video_pad|>?<|im_end|>\n"
            "<|im_start|>assistant\nred<|im_end|>\n"
        ],
        images=[[Image.open(tmp_path / "wide.png").convert("RGB")]],
        videos=[frames] * 2,
        video_metadata=[{"total_num_frames": 9, "fps": 4.0, "duration": 9 / 4}] * 2,
        do_sample_frames=True,
        return_tensors="pt",
    )
    assert kind.tokenizer.decode(sample["input_ids"]) == kind.tokenizer.decode(right["input_ids"][0])
    found, images = sample["images"].tensors(), len(right["target_sizes"])
    pixels = {name: split_patches(right[f"pixel_values{name}"]) for name in ("", "_videos")}
    first = len(pixels["_videos"]) // 2
    joined = (pixels["_videos"][:first], pixels[""], pixels["_videos"][first:])
    assert torch.equal(found["pixel_values"], torch.cat(joined))
    frames = len(right["target_sizes_videos"])
    assert frames == 2 * 3 * (1 if size == (16, 16) else 1 + 4)
    assert len(found["target_sizes"]) == len(sample["images"].places) == images + frames


def test_minicpm_sees_every_image_of_a_video_that_is_a_list(tmp_path, monkeypatch):
    pytest.importorskip("av")
    pytest.importorskip("torchvision")
    kind, videos = minicpm_with_videos(tmp_path, monkeypatch)
    frames = [f"{number}.png" for number in range(6)]
    for number, name in enumerate(frames):
        Image.new("RGB", (40, 24), (40 * number, 80, 10)).save(tmp_path / name)
    turns = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "red"}]
    (sample,) = load(kind, tmp_path, {"messages": turns, "videos": [frames]})
    right = videos(
        videos=[np.stack([np.asarray(Image.open(tmp_path / name)) for name in frames])],
        do_sample_frames=False,
        input_data_format="channels_last",
        return_tensors="pt",
    )
    assert len(sample["images"].places) == len(right["target_sizes_videos"]) == 6 * (1 + 4)
    pixels = sample["images"].tensors()["pixel_values"]
    assert torch.equal(pixels, split_patches(right["pixel_values_videos"]))


def test_options_of_videos_that_minicpm_cannot_use_raise_one_error():
    pytest.importorskip("torchvision")
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor

    kind, _ = minicpm()

    def tokens(options, **different):
        videos = MiniCPMV4_6VideoProcessor(**different)
        context = MediaContext(videos, 1, kind.config, kind.tokenizer)
        return SliceVideoTokens(context, options, numbered=True)

    assert tokens(data_arguments(video_max_frames=3)).grid(VideoFacts(80, 8.0, 448, 448)).frames == 3
    assert tokens(data_arguments(video_fps=1.0)).grid(VideoFacts(80, 8.0, 448, 448)).frames == 10
    expected = r"video_fps is 2; expected 1, because MiniCPMV4_6VideoProcessor .*; leave it out"
    with pytest.raises(UsageError, match=expected):
        tokens(data_arguments(video_fps=2.0))
    with pytest.raises(UsageError, match="stack_frames is 3; expected 1"):
        tokens(data_arguments(), stack_frames=3)
    with pytest.raises(McaError, match=r"lasts 10.0 seconds, more than video_max_seconds 4"):
        tokens(data_arguments(video_max_seconds=4.0)).grid(VideoFacts(80, 8.0, 448, 448))


@pytest.mark.parametrize("size", [(16, 16), (16, 32), (32, 16), (32, 48)])
def test_tiles_of_llama_4_are_counted_as_its_processor_cuts_them(size):
    kind, _ = llama4()
    tokens = TileRowTokens(MediaContext(kind.processor, 9, kind.config, kind.tokenizer))
    cut = kind.processor(images=[Image.new("RGB", size[::-1])], return_tensors="pt")
    grid = tokens._computed(*size)
    assert grid.rows == len(cut["pixel_values"])
    assert tokens.ids(grid).count(9) == 4 * grid.rows
    assert tokens._output_grids(cut) == [grid]


@pytest.mark.parametrize(
    ("tokens", "span"),
    [
        ([5, 8, 9, 9, 7, 5], (1, 5)),
        ([8, 9, 9, 7], (0, 4)),
        ([5, 8, 9, 9, 5, 7], (1, 4)),
        ([5, 5, 9, 9, 7, 5], (2, 5)),
        ([9, 9], (0, 2)),
    ],
)
def test_an_images_span_has_the_marks_that_are_there(tokens, span):
    """Two placeholders 9, which marks 8 and 7 may enclose."""
    image = SimpleNamespace(marks=lambda grid: ((8,), (7,)))
    where = [place for place, token in enumerate(tokens) if token == 9]
    grid = SimpleNamespace()
    sequence = SimpleNamespace(_split=lambda tokens, grids: [(grid, where)], _images=image)
    assert MediaTokens.spans(sequence, tokens, [grid]) == [span]
