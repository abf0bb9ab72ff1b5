"""Tiles, frames and windows that a plan counts are those that transformers' processors make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf
from mca_train.dry_run.samples import _PIXELS
from mca_train.plan.audio_memory import plan_clips
from mca_train.plan.vision_memory import Images, _image_layout, plan_images, plan_videos

DATA = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs"
ALL = frozenset({"language", "vision", "audio", "projector"})
LONG = 1 << 20


def published(name: str) -> McaModelConfig:
    return config_from_hf(json.loads((DATA / f"{name}.json").read_text()))


def planned(name: str, **options: Any) -> Images:
    found = plan_images(published(name), ALL, LONG, takes=True, **options)
    assert found is not None
    return found


def processed(module: str, cls: str, pixels: int = 448, **options: Any) -> dict[str, torch.Tensor]:
    """Return what a processor makes of a square image of ``pixels``."""
    from importlib import import_module

    kind = getattr(import_module(f"transformers.models.{module}"), cls)
    image = np.zeros((pixels, pixels, 3), np.uint8)
    return dict(kind()(images=[image], return_tensors="pt", **options).data)


def test_a_pixtral_tower_that_names_no_merge_has_that_of_transformers() -> None:
    from transformers import Mistral3Config

    layout = _image_layout(published("mistral-small-3.2-24b"), {}, {"model_type": "pixtral"})
    assert layout == ("sizes", None, Mistral3Config().spatial_merge_size)


def test_tiles_of_joined_images_are_those_of_the_processor() -> None:
    made = processed(
        "llava_next.image_processing_pil_llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
    )
    found = planned("llava-1.6-mistral-7b", pixels=448)
    assert found.extent is not None
    assert (found.extent.tiles, found.tower.tile) == (
        made["pixel_values"].shape[1],
        made["pixel_values"].shape[-1],
    )
    assert found.patches == found.extent.tiles * (336 // 14) ** 2
    together = planned("llava-onevision-qwen2-7b", count=2)
    assert together.extent is not None
    assert (together.extent.tiles, together.tokens) == (1, 730)


@pytest.mark.parametrize(
    ("name", "module", "cls"),
    [
        ("idefics3-8b-llama3", "idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
        ("ovis2-1b", "ovis2.image_processing_pil_ovis2", "Ovis2ImageProcessorPil"),
    ],
)
def test_a_tile_has_the_size_that_the_processor_gives_it(name: str, module: str, cls: str) -> None:
    options = {"size": {"height": 448, "width": 448}} if name.startswith("ovis2") else {}
    assert processed(module, cls, **options)["pixel_values"].shape[-1] == planned(name).pixels


def test_an_image_in_its_own_proportions_has_the_patches_of_the_processor() -> None:
    made = processed("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor")
    ((high, wide),) = made["spatial_shapes"].tolist()
    found = planned("lfm2-vl-450m", pixels=448)
    assert (found.patches, found.tokens) == (high * wide, high * wide // 4)


@pytest.mark.parametrize("pixels", [224, 448, 500, 896, 1344])
def test_images_and_frames_of_minicpm_have_the_slices_of_the_processor(pixels: int) -> None:
    module = "minicpmv4_6.image_processing_pil_minicpmv4_6"
    sizes = processed(module, "MiniCPMV4_6ImageProcessorPil", pixels)["target_sizes"].tolist()
    found = planned("minicpm-v-4.6", pixels=pixels)
    areas = [high * wide for high, wide in sizes]
    assert (found.patches, found.tokens) == (sum(areas), sum(areas) // 16)
    assert found._attended == sum(area**2 for area in areas) / sum(areas)
    assert _PIXELS[found.tower.form](found)["target_sizes"].tolist() == sizes
    frames = plan_videos(published("minicpm-v-4.6"), ALL, LONG, takes=True, count=2, frames=3, pixels=pixels)
    assert frames is not None
    assert (frames.patches, frames.count * frames.tokens) == (6 * found.patches, 6 * found.tokens)


@pytest.mark.parametrize(
    "options", [{"max_slice_nums": 4}, {"scale_resolution": 336, "max_slice_nums": 6}, {"slice_mode": False}]
)
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_slices_of_minicpm_follow_the_processor_of_the_model(
    options: dict[str, int], name: str, tmp_path: Path
) -> None:
    module, cls = "minicpmv4_6.image_processing_pil_minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"
    sizes = processed(module, cls, 1344, **options)["target_sizes"].tolist()
    saved = {"image_processor_type": "MiniCPMV4_6ImageProcessor", **options}
    nested = {"image_processor": saved} if name == "processor_config.json" else saved
    (tmp_path / name).write_text(json.dumps(nested))
    found, usual = (planned("minicpm-v-4.6", pixels=1344, folder=folder) for folder in (tmp_path, None))
    assert found.tokens == sum(high * wide for high, wide in sizes) // 16 != usual.tokens


FRAMES = 6


def of_qwen() -> int:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    video = np.zeros((FRAMES, 448, 448, 3), np.uint8)
    made = Qwen2VLVideoProcessor(do_sample_frames=False)(videos=[video], return_tensors="pt")
    return int(made["video_grid_thw"].prod()) // 4


def of_gemma() -> int:
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    video = np.zeros((FRAMES, 3, 96, 96), np.uint8)
    made = Gemma4VideoProcessor(do_sample_frames=False)(videos=[video], return_tensors="pt")
    return FRAMES * int(made["num_soft_tokens_per_video"][0])


@pytest.mark.parametrize(
    ("name", "pixels", "tokens"),
    [("qwen2.5-vl-72b", 448, of_qwen), ("gemma-4-e2b", None, of_gemma)],
)
def test_frames_have_the_tokens_that_the_processor_gives_them(
    name: str, pixels: int | None, tokens: Callable[[], int]
) -> None:
    pytest.importorskip("torchvision")
    found = plan_videos(published(name), ALL, LONG, takes=True, count=1, frames=FRAMES, pixels=pixels)
    assert found is not None
    assert found.count * found.tokens == tokens()
    twice = plan_videos(published(name), ALL, LONG, takes=True, count=2, frames=FRAMES, pixels=pixels)
    assert twice is not None
    assert (twice.patches, twice.length) == (2 * found.patches, 2 * found.length)


def test_frames_of_a_video_are_tiles_of_one_medium_where_features_follow_it() -> None:
    found = plan_videos(published("llava-onevision-qwen2-7b"), ALL, LONG, takes=True, count=2, frames=3)
    assert found is not None
    assert (found.count, found.tokens, found.patches) == (2, 3 * 196 + 1, 2 * 3 * 27**2)


def test_videos_that_cannot_be_planned_raise_one_error() -> None:
    with pytest.raises(UsageError, match="--videos: a gemma3 model takes no videos"):
        plan_videos(published("gemma-3-27b"), ALL, LONG, takes=True, count=1)
    with pytest.raises(
        UsageError, match="--videos 2: they are 8224 tokens, and a sequence has 4096 without images"
    ):
        plan_videos(published("qwen2.5-vl-72b"), ALL, 4096, takes=True, count=2)
    assert plan_videos(published("qwen2.5-vl-72b"), ALL, 4096, takes=True) is None


@pytest.mark.parametrize(
    ("name", "seconds", "tokens", "windows"),
    [
        ("voxtral-mini-3b", 31, 2 * 375, 2),
        ("audio-flamingo-3", 31, 750 + 25, 2),
        ("glm-asr-nano", 30, 375, 1),
        ("gemma-4-e2b", 30, 750, 1),
        ("gemma-4-12b", 31, 775, 1),
    ],
)
def test_clips_have_windows_and_tokens(name: str, seconds: float, tokens: int, windows: int) -> None:
    found = plan_clips(published(name), ALL, LONG, takes=True, count=1, seconds=seconds)
    assert found is not None
    assert (found.tokens, found.windows) == (tokens, windows)
    assert "audio tower" in {line.what for line in found.lines(Sizes())} or not found.depth


class Sizes:
    """One sequence in bf16."""

    sequences, width = 1, 2


def test_gemma_4_hears_half_a_minute() -> None:
    with pytest.raises(UsageError, match="--clip_seconds 31: clips of gemma4 have at most 30 seconds"):
        plan_clips(published("gemma-4-e2b"), ALL, LONG, takes=True, seconds=31)


@pytest.mark.parametrize(("name", "seconds"), [("audio-flamingo-3", 600), ("glm-asr-nano", 630)])
def test_clips_of_several_windows_have_a_longest(name: str, seconds: int) -> None:
    most = plan_clips(published(name), ALL, LONG, takes=True, seconds=seconds)
    assert most is not None and most.windows == seconds // 30
    with pytest.raises(UsageError, match=f"--clip_seconds {seconds + 1}: .* have at most {seconds} seconds"):
        plan_clips(published(name), ALL, LONG, takes=True, seconds=seconds + 1)


def test_frames_of_a_fixed_size_have_no_other() -> None:
    with pytest.raises(UsageError, match=r"--image_size 112: .* are all of 448 pixels"):
        plan_videos(published("internvl3-78b"), ALL, LONG, takes=True, count=1, pixels=112)


@pytest.mark.parametrize(
    ("name", "other", "side"), [("llava-onevision-qwen2-7b", 500, 384), ("gemma-4-e2b", 768, 384)]
)
def test_images_may_have_another_size_than_frames(name: str, other: int, side: int) -> None:
    request = {"takes": True, "count": 1, "frames": FRAMES}
    with pytest.raises(UsageError, match=f"--image_size {other}: frames of .* are all of {side} pixels"):
        plan_videos(published(name), ALL, LONG, **request, pixels=other)
    both = plan_videos(published(name), ALL, LONG, **request, pixels=other, with_images=True)
    assert both == plan_videos(published(name), ALL, LONG, **request)
    assert both is not None and both.pixels == side
