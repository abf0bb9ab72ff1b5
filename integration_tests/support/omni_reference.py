"""Rows of Qwen's omni models with text, images, videos and audio clips, and transformers' inputs for them."""

from dataclasses import dataclass
from typing import Literal

import torch

from mca_models.media import ImageSpan

OMNI = ("qwen2_5_omni", "qwen3_omni")
"""Begin the names of cases."""
START, END = {"image": 67, "video": 67, "audio": 64}, {"image": 68, "video": 68, "audio": 63}
PLACEHOLDER = {"image": 65, "video": 66, "audio": 69}
PER_SECOND = 25
"""Time positions of a second, transformers' default."""
MELS, FRAMES = 8, 128


@dataclass(frozen=True)
class Medium:
    """One medium of a row, each frame of which is of two times two tokens.

    Args:
        kind: Its kind.
        start: Its first placeholder.
        count: Frames of a video, or tokens of a clip.
        seconds: From one frame to the next.
    """

    kind: Literal["image", "video", "audio"]
    start: int
    count: int = 1
    seconds: float = 1.0


ROWS: tuple[tuple[Medium, ...], ...] = (
    (
        Medium("image", 2),
        Medium("audio", 9, 4),
        Medium("video", 15, 2, 1.5),
    ),  # the clip is on both sides of a cut
    (),
    (Medium("audio", 1, 3), Medium("video", 6, 2, 0.3), Medium("image", 16)),
    (Medium("audio", 3, 16),),
)


def places(case: str) -> tuple[tuple[ImageSpan, ...], ...]:
    """Return the spans of each row."""
    exact = case.startswith("qwen3")
    return tuple(
        tuple(
            ImageSpan(each.start, 1, each.count, medium="audio")
            if each.kind == "audio"
            else ImageSpan(
                each.start, 2, 2, each.count, each.seconds, PER_SECOND, past_time=True, exact=exact
            )
            for each in row
        )
        for row in ROWS
    )


def write_tokens(ids: torch.Tensor, number: int) -> None:
    """Write the placeholders of row ``number`` and the marks around them."""
    for each, span in zip(ROWS[number], places("")[number], strict=True):
        stop = each.start + span.tokens
        ids[each.start : stop] = PLACEHOLDER[each.kind]
        ids[each.start - 1] = START[each.kind]
        if stop < len(ids):
            ids[stop] = END[each.kind]


def audio_frames(case: str, tokens: int) -> int:
    """Return a number of frames that makes so many tokens, of Qwen 3 Omni 13 in each second."""
    if case.startswith("qwen3"):
        return tokens // 13 * 100 + 8 * (tokens % 13) - 3
    return 4 * tokens + 1


def inputs(case: str, number: int) -> dict[str, torch.Tensor]:
    """Return transformers' inputs for row ``number``; clips are padded with noise."""
    generator = torch.Generator().manual_seed(number)
    found: dict[str, torch.Tensor] = {}
    row = ROWS[number]
    for kind, suffix in (("image", ""), ("video", "_videos")):
        if own := [each for each in row if each.kind == kind]:
            grids = torch.tensor([(each.count, 4, 4) for each in own])
            found[f"pixel_values{suffix}"] = torch.randn(int(grids.prod(1).sum()), 96, generator=generator)
            found[f"{kind}_grid_thw"] = grids
            if kind == "video":
                found["video_second_per_grid"] = torch.tensor([each.seconds for each in own])
    if clips := [each for each in row if each.kind == "audio"]:
        frames = torch.tensor([audio_frames(case, each.count) for each in clips])
        found["input_features"] = torch.randn(len(clips), MELS, FRAMES, generator=generator)
        found["feature_attention_mask"] = (torch.arange(FRAMES) < frames[:, None]).long()
    return found


def chunk_inputs(found: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Return a chunk's inputs for row ``number``: images and frames in the order of their tokens, and clips."""
    made = {name: found[name] for name in ("input_features", "feature_attention_mask") if name in found}
    seen = [each for each in ROWS[number] if each.kind != "audio"]
    if seen:
        left = {"image": found.get("pixel_values"), "video": found.get("pixel_values_videos")}
        parts = []
        for each in seen:
            pixels = left[each.kind]
            assert pixels is not None, "each medium has pixels"
            parts.append(pixels[: 16 * each.count])
            left[each.kind] = pixels[16 * each.count :]
        made["pixel_values"] = torch.cat(parts)
        made["image_grid_thw"] = torch.tensor([(1, 4, 4)] * sum(each.count for each in seen))
    return made
