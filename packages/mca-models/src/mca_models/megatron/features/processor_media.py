"""Media of a sequence from the outputs of a checkpoint's processor, such as ``pixel_values``.

The towers take images and the frames of videos in the order of their tokens; a processor returns them by medium.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import ImageSpan, placeholders
from mca_models.megatron.features.media_features import MediaItem, split_clips, split_images, split_patches
from mca_models.megatron.features.sequence_media import SequenceMedia, join_tensors
from mca_models.templates import get_family

_IMAGES = (
    *("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "grids"),
    *("pixel_attention_mask", "spatial_shapes", "batch_num_images", "target_sizes"),
)
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")
"""Seconds from one frame of each video to the next, by processor."""
_VIDEOS = ("pixel_values_videos", "video_grid_thw", "video_position_ids", "target_sizes_videos", *_SECONDS)
_UNREAD = (
    *("input_ids", "attention_mask", "position_ids", "rope_deltas", "token_type_ids", "mm_token_type_ids"),
    *("num_patches", "num_crops", "aspect_ratios", "rows", "cols", "image_rows", "image_cols"),
    *("grids_videos", "num_patches_per_image", "num_patches_per_frame"),
    *("num_soft_tokens_per_image", "num_soft_tokens_per_video", "num_frames_per_video"),
)
"""Outputs that follow from the tokens and the other outputs."""
_BEHIND_IMAGE_TOKENS = ("second_after", "seconds_after", "numbered")
"""Videos whose frames have the placeholder of images."""
_DIGEST = 256
"""Numbers of a tensor that are compared over ranks: other pixels differ in most."""


@dataclass(frozen=True)
class LocatedMedia:
    """Media of a sequence with tensors in memory.

    Args:
        places: Locations among its tokens, in order.
        parts: Inputs of the towers for each image, frame, video or clip.
    """

    places: tuple[ImageSpan, ...]
    parts: tuple[Mapping[str, Tensor], ...]

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the inputs of the towers."""
        return join_tensors(self.parts)

    def checksum(self, start: int = 0) -> int:
        """Return a CRC-32 of about `_DIGEST` numbers of each tensor, from all over it."""
        for part in self.parts:
            for name, tensor in sorted(part.items()):
                flat = tensor.detach().flatten()
                step = max(flat.numel() // _DIGEST, 1) | 1  # odd, so that it meets all columns of patches
                header = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
                chosen = flat[::step].double().cpu().numpy()
                start = zlib.crc32(chosen.tobytes(), zlib.crc32(header.encode(), start))
        return start


@dataclass(frozen=True)
class _Item:
    """One image, one clip, one frame of a video, or a video without text between its frames.

    Args:
        arguments: Inputs of its tower.
        tokens: Number of its placeholders.
        span: Location with the start 0, for positions on three axes; None: any number of runs of tokens.
    """

    arguments: JsonObject
    tokens: int
    span: ImageSpan | None = field(default=None)


def sequence_media(
    tokens: Tensor, given: SequenceMedia | Mapping[str, Tensor] | None, config: McaModelConfig
) -> SequenceMedia | None:
    """Return the media of one sequence; None: it has none.

    Args:
        tokens: Tokens of the sequence, ``[tokens]``.
        given: Outputs of the processor, or located media.
        config: Configuration of the model.

    Raises:
        McaError: The placeholders among the tokens are not those of the media, or an output is unknown.
    """
    ids = tokens.cpu()
    if given is None or not isinstance(given, Mapping):
        _require_covered(ids, given.places if given else (), config)
        return given
    if lists := [name for name, x in given.items() if not isinstance(x, Tensor) and name not in _UNREAD]:
        raise McaError(
            f"{lists[0]} is a {type(given[lists[0]]).__name__}; call the processor with return_tensors='pt'"
        )
    inputs = {name: x.cpu() for name, x in given.items() if isinstance(x, Tensor) and name not in _UNREAD}
    found = _locate(ids, _items(inputs, config), config)
    _require_covered(ids, found.places, config)
    return found if found.places else None


def _require_covered(ids: Tensor, places: Sequence[ImageSpan], config: McaModelConfig) -> None:
    """Raise if a placeholder is not of an image of ``places``, or these cover other tokens."""
    known = _placeholders(config)
    is_known = torch.isin(
        ids, torch.tensor([token for own in known.values() for token in own], dtype=ids.dtype)
    )
    covered = torch.zeros_like(is_known)
    for place in places:
        if place.start + place.tokens > len(ids):
            raise McaError(
                f"an {place.medium} ends at token {place.start + place.tokens} of {len(ids)}"
                "; pass the input_ids of the processor uncut"
            )
        covered[place.start : place.start + place.tokens] = True
    if torch.equal(covered, is_known):
        return
    counts = {medium: int(torch.isin(ids, torch.tensor(own)).sum()) for medium, own in known.items()}
    wanted = ", ".join(f"{count} of {medium}s" for medium, count in counts.items() if count) or "none"
    raise McaError(
        f"input_ids have placeholders: {wanted}; the media of the sequence have {int(covered.sum())} tokens: pass the "
        "processor's outputs (pixel_values, ...) of exactly these media for each sequence"
    )


def _placeholders(config: McaModelConfig) -> dict[str, list[int]]:
    """Return the tokens of each medium, including marks that have features."""
    found = {medium: [token] for medium, token in placeholders(config.vision_fields).items()}
    marks = (config.vision_fields or {}).get("visual_indicator_token_ids")
    family = get_family(config.model_type).vision
    if marks is not None and family is not None and family.image_tokens == "word_marks":
        found["image"] += marks
    return found


def _locate(ids: Tensor, items: Mapping[str, list[_Item]], config: McaModelConfig) -> LocatedMedia:
    """Return the media of ``ids``; each medium's items take its placeholders in order."""
    known = _placeholders(config)
    found: list[tuple[int, tuple[ImageSpan, ...], JsonObject]] = []
    for medium, own in items.items():
        left = torch.isin(ids, torch.tensor(known.get(medium, []), dtype=ids.dtype)).nonzero()[:, 0].tolist()
        if (wanted := sum(item.tokens for item in own)) != len(left):
            raise McaError(
                f"input_ids have {len(left)} placeholders of {medium}s, but the processor's outputs are for {wanted}"
                "; pass the input_ids that the processor returned with them"
            )
        for item in own:
            if item.tokens < 1:
                raise McaError(f"an {medium} is too small for one feature; remove it")
            where, left = left[: item.tokens], left[item.tokens :]
            if medium == "video":
                _require_silent(ids, where, config)
            found.append((where[0], tuple(_spans(where, item, medium)), item.arguments))
    found.sort(key=lambda each: each[0])
    return LocatedMedia(
        tuple(span for _, spans, _ in found for span in spans), tuple(arguments for *_, arguments in found)
    )


def _require_silent(ids: Tensor, where: Sequence[int], config: McaModelConfig) -> None:
    """Raise if the tokens of a video have those of its sound next to them."""
    vision = config.vision_fields or {}
    marks = [vision.get("audio_token_id"), vision.get("audio_start_token_id")]
    near = [int(ids[index]) for index in (where[0] - 1, where[-1] + 1) if 0 <= index < len(ids)]
    if any(mark in near for mark in marks if mark is not None):
        raise McaError(
            "a video has the sound of its file (use_audio_in_video), which is not supported here; pass the images of "
            "a sample of mca, or set use_audio_in_video to false"
        )


def _spans(where: Sequence[int], item: _Item, medium: str) -> Iterator[ImageSpan]:
    """Yield the location of an item, or one for each run of its tokens."""
    runs = [
        [index for _, index in run] for _, run in groupby(enumerate(where), lambda each: each[1] - each[0])
    ]
    if item.span is not None:
        if len(runs) > 1:
            raise McaError(
                f"the {item.tokens} placeholders of one {medium} are not next to each other; pass the tokens that the "
                "processor returned"
            )
        yield replace(item.span, start=where[0])
        return
    for run in runs:
        yield ImageSpan(run[0], 1, len(run), medium="audio" if medium == "audio" else "image")


def _items(inputs: JsonObject, config: McaModelConfig) -> dict[str, list[_Item]]:
    """Return the items of each medium of a processor's outputs."""
    family = get_family(config.model_type).vision
    if family is None or config.vision is None:
        raise McaError(f"a {config.model_type} model takes no media; pass text only")
    audio = () if family.audio is None else family.audio.inputs
    if unknown := sorted(inputs.keys() - {*_IMAGES, *_VIDEOS, *audio}):
        raise McaError(
            f"{', '.join(unknown)}: no output of the processor of {config.model_type} that mca takes; expected those "
            f"of {', '.join(sorted({*_IMAGES, *_VIDEOS, *audio}))}"
        )
    found: dict[str, list[_Item]] = {}
    if "pixel_values" in inputs:
        found["image"] = list(_images({name: inputs[name] for name in _IMAGES if name in inputs}, config))
    if "pixel_values_videos" in inputs:
        medium = "image" if family.video_tokens in _BEHIND_IMAGE_TOKENS else "video"
        if medium in found:
            raise McaError(
                f"a sequence of {config.model_type} has images and videos, whose placeholders are the same; pass "
                "located media"
            )
        found[medium] = list(_videos(inputs, config))
    if audio and (clips := {name: inputs[name] for name in audio if name in inputs}):
        if absent := [name for name in audio if name not in inputs]:
            raise McaError(
                f"{absent[0]} is missing among the processor's outputs, which have input_features"
                "; pass all of them"
            )
        found["audio"] = [_Item(clip.arguments, clip.rows) for clip in split_clips(clips, config)]
    return found


def _images(images: JsonObject, config: McaModelConfig) -> Iterator[_Item]:
    """Yield the images of a processor's outputs."""
    family = get_family(config.model_type).vision
    assert family is not None, "a model with images has a vision model"
    pixels: Tensor = images["pixel_values"]
    if (
        family.image_tokens == "row_column_tiles"
    ):  # [1, tiles, 3, h, w] of the processor, or tiles that are alone
        if "pixel_attention_mask" in images and not images["pixel_attention_mask"].all():
            raise McaError(
                "pixel_attention_mask marks padding in tiles; give each sequence the outputs for it alone"
            )
        images = {"pixel_values": pixels.flatten(0, 1)[:, None]}
    if "target_sizes" in images:
        images = {**images, "pixel_values": split_patches(pixels)}
    if family.tokens_together is not None:  # the processor's number is for the whole batch
        count = len(images["image_sizes"])
        images = {**images, "batch_num_images": torch.full((count,), count)}
    for image in split_images(images, config):
        yield _Item(image.arguments, image.rows, _grid_span(image, config))


def _grid_span(image: MediaItem, config: McaModelConfig) -> ImageSpan | None:
    """Return the rows and columns of an image with positions on three axes."""
    grid = image.arguments.get("image_grid_thw")
    if grid is None or config.mrope is None:
        return None
    ((frames, high, wide),) = grid.tolist()
    merge = _merge_size(config)
    if frames != 1:
        raise McaError(f"image_grid_thw has an image of {frames} frames; expected 1")
    return ImageSpan(0, high // merge, wide // merge)


def _merge_size(config: McaModelConfig) -> int:
    vision = (config.vision_fields or {})["vision_config"]
    return int(vision.get("spatial_merge_size", 2))


def _videos(inputs: JsonObject, config: McaModelConfig) -> Iterator[_Item]:
    """Yield the videos of a processor's outputs, or their frames where text is between them."""
    family = get_family(config.model_type).vision
    assert family is not None, "a model with videos has a vision model"
    pixels: Tensor = inputs["pixel_values_videos"]
    if family.video_tokens is None:
        raise McaError(f"videos of {config.model_type} are not supported; pass images or text")
    if "video_grid_thw" in inputs:
        yield from _grid_videos(pixels, inputs, config)
        return
    if "video_position_ids" in inputs:
        positions = inputs["video_position_ids"].flatten(0, -3)
        frames = {"pixel_values": pixels.flatten(0, -3), "image_position_ids": positions}
    elif "target_sizes_videos" in inputs:
        frames = {"pixel_values": split_patches(pixels), "target_sizes": inputs["target_sizes_videos"]}
    elif family.video_tokens == "pooled":
        count, num_frames, *_, height, width = pixels.shape
        frames = {
            "pixel_values": pixels,
            "image_sizes": torch.tensor([[height, width]] * count),
            "batch_num_images": torch.tensor([-num_frames] * count),
        }
    else:
        raise McaError("pixel_values_videos without video_grid_thw or video_position_ids; pass both")
    yield from (_Item(each.arguments, each.rows) for each in split_images(frames, config))


def _grid_videos(pixels: Tensor, inputs: JsonObject, config: McaModelConfig) -> Iterator[_Item]:
    """Yield videos with a grid of patches in each frame; every frame is a grid of one frame for the tower."""
    family = get_family(config.model_type).vision
    assert family is not None, "a model with videos has a vision model"
    grids: list[list[int]] = inputs["video_grid_thw"].tolist()
    merge = _merge_size(config)
    intervals = _intervals(len(grids), inputs, config)
    videos = pixels.split([frames * high * wide for frames, high, wide in grids])
    for number, ((frames, high, wide), video) in enumerate(zip(grids, videos, strict=True)):
        rows, columns = high // merge, wide // merge
        if family.video_tokens != "together":
            for frame in video.chunk(frames):
                arguments = {"pixel_values": frame, "image_grid_thw": torch.tensor([[1, high, wide]])}
                yield _Item(arguments, rows * columns, ImageSpan(0, rows, columns))
            continue
        interval, per_second = intervals[number]
        rules = family.video_rules
        span = ImageSpan(0, rows, columns, frames, interval, per_second)
        if rules is not None:
            span = replace(span, past_time=True, exact=rules.exact)
        arguments = {"pixel_values": video, "image_grid_thw": torch.tensor([[1, high, wide]] * frames)}
        yield _Item(arguments, frames * rows * columns, span)


def _intervals(count: int, inputs: JsonObject, config: McaModelConfig) -> list[tuple[float, float]]:
    """Return for each video the time from one frame to the next, and the time positions of its unit."""
    family = get_family(config.model_type).vision
    if family is None or family.tokens_per_second is None:
        return [(1.0, 1.0)] * count
    seconds = next((inputs[name] for name in _SECONDS if name in inputs), None)
    if seconds is None or len(seconds) != count:
        raise McaError(
            f"{' or '.join(_SECONDS)} must have one number for each of {count} videos; pass the processor's"
        )
    vision = config.vision_fields or {}
    if family.video_rules is not None:
        per_second = float(vision.get("position_id_per_seconds", family.tokens_per_second))
        return [(float(each), per_second) for each in seconds]
    per_second = float(vision["vision_config"].get("tokens_per_second", family.tokens_per_second))
    return [(float(torch.tensor(float(each)) * per_second), 1.0) for each in seconds]
