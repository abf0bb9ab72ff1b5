"""Frames, token counts and pixel tensors of videos, from the video processor of the checkpoint.

Qwen 2 VL, 2.5 VL   the frames follow one another, in Qwen 2.5 VL with time positions in seconds
Qwen 2.5, 3 Omni    the same, in seconds of the requested rate, and text behind the last frame's time
Qwen 3 VL, 3.5      each frame is between two marks, behind its time in words
GLM-4V, 4.6V        each frame is an image, in front of its time
InternVL            each frame is an image, behind its number
Gemma 4             each frame is between two marks, behind its minutes and seconds
MiniCPM-V           each frame is an image with slices, all behind the number of the video
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_models.media import ImageSpan
from mca_models.megatron.features.media_features import split_patches
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import VideoTokenKind
from mca_train.config.arguments import DataArguments
from mca_train.data.image_tiles import INTERNVL_MARKS, SliceTokens
from mca_train.data.medium_tokens import (
    Grid,
    MediaContext,
    MediumTokens,
    config_ids,
    load_processor,
    locate_runs,
    require_placeholder,
    require_unchanged,
)
from mca_train.data.message_parts import IMAGE, VIDEO
from mca_train.data.patch_grids import (
    POOLED_MARKS,
    grids_of_positions,
    pooled_sides,
    resized_sides,
    without_padding,
)
from mca_train.data.placeholders import media_fields
from mca_train.data.video_files import Video, VideoFacts, require_video_packages
from mca_train.types import ImageProcessor, Upstream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FPS = 2.0
"""Frames per second where neither the run nor the checkpoint gives a number, as in Qwen's own tools."""


class VideoTokens(MediumTokens):
    """Video tokens of a model whose frames follow one another.

    Args:
        context: Video processor, which is changed to the options, and model.
        arguments: Options of the run.

    Raises:
        UsageError: The options do not fit the processor.
    """

    placeholder = VIDEO
    """Medium with the placeholder of frames."""
    uses_sound = False
    """The sound of videos is used."""

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context)
        self._arguments, self._rules = arguments, context.family.video_rules
        self._tokens_per_second = positions_per_second(context.config)
        processor, rules = self.processor, self._rules
        if rules is not None:
            least, most = rules.pixels
            processor.size = type(processor.size)(shortest_edge=least, longest_edge=most)
        self._sides = self._resized_sides()
        self._sampled = lru_cache(maxsize=1 << 12)(self._sample)
        _apply_options(processor, arguments, DEFAULT_FPS if rules is None else rules.fps)

    @property
    def list_fps(self) -> float:
        """Frames per second of a list of images, all of which the processor takes at this rate."""
        return float(self.processor.fps or DEFAULT_FPS)

    def grid(self, facts: VideoFacts) -> Grid:
        """Return the grid of a video.

        Raises:
            McaError: The video is too long, or the processor does not support its size.
        """
        self._require_short(facts)
        own, indices = self.processor, self._sampled(facts)
        try:
            rows, columns = self._sides(facts.height, facts.width, len(indices))
            patches = self._count_patches(facts, indices, rows * columns)
        except ValueError as error:
            size = f"{facts.frames} frames of {facts.width} x {facts.height} pixels"
            raise McaError(f"a video of {size} cannot be used: {error}") from error
        frames = -(-len(indices) // own.temporal_patch_size)
        if frames * rows * columns * own.merge_size**2 != patches:
            raise McaError(
                f"{type(own).__name__} makes {patches} patches of a video, which are not {frames} x {rows} x {columns} "
                "tokens; set cap_pixels_per_frame to false in video_preprocessor_config.json"
            )
        return Grid(rows, columns, frames, self._interval(facts, len(indices)), self._times(facts, indices))

    def _require_short(self, facts: VideoFacts) -> None:
        limit = self._arguments.video_max_seconds
        if limit is not None and facts.seconds > limit:
            raise McaError(
                f"it lasts {facts.seconds:.1f} seconds, more than video_max_seconds {limit:g}; cut it, raise "
                "video_max_seconds, or remove the row"
            )

    def _resized_sides(self) -> Callable[[int, int, int], tuple[int, int]]:
        """Return the function from height, width and number of frames to the rows and columns of tokens."""
        return resized_sides(self.processor)

    def _count_patches(self, facts: VideoFacts, indices: Sequence[int], tokens: int) -> int:
        """Return the number of patches that the processor makes, of frames with as many ``tokens`` each."""
        patches: int = self.processor.get_num_of_video_patches(len(indices), facts.height, facts.width, {})
        return patches

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees."""
        step, most = self.processor.temporal_patch_size, self._arguments.video_max_frames
        if facts.frames < step:
            return tuple(range(facts.frames))
        found = [int(index) for index in self.processor.sample_frames(metadata=_metadata(facts))]
        if most is not None and len(found) > most:  # of a processor without a limit
            places = np.linspace(0, len(found) - 1, most - most % step).round().astype(int)
            found = [found[place] for place in places]
        return tuple(found)

    def _interval(self, facts: VideoFacts, frames: int) -> float:
        """Return the time positions from a frame to the next, or with rules the seconds, as transformers does."""
        if self._rules is not None:
            return float(self.processor.temporal_patch_size / (self.processor.fps or self._rules.fps))
        if self._tokens_per_second is None:
            return 1.0
        seconds = self.processor.temporal_patch_size / (frames / facts.frames * facts.fps)
        return float(np.float32(seconds) * np.float32(self._tokens_per_second))

    def _times(self, facts: VideoFacts, indices: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of frames, each between the first and the last that are merged into it."""
        step = self.processor.temporal_patch_size
        padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
        return tuple(
            (padded[start] / facts.fps + padded[start + step - 1] / facts.fps) / 2
            for start in range(0, len(padded), step)
        )

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the locations of a video from the indices ``where`` of its placeholders."""
        span = ImageSpan(int(where[0]), grid.rows, grid.columns, grid.frames, grid.interval)
        if self._rules is None:
            return [span]
        per_second = self._tokens_per_second or 1.0
        return [replace(span, per_second=per_second, past_time=True, exact=self._rules.exact)]

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``, whose placeholders are ``grid``.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        facts, place = video.facts(), f"video {video.place}"
        require_unchanged(place, grid, self.grid(facts))
        made: Mapping[str, Tensor] = self.processor(
            videos=[video.frames(self._sampled(facts))],
            do_sample_frames=False,
            input_data_format="channels_last",
            return_tensors="pt",
        )
        require_unchanged(place, grid, self._output_grid(made, grid))
        return self._tower_inputs(made)

    def _output_grid(self, made: Mapping[str, Tensor], grid: Grid) -> Grid:
        """Return the grid of a video from the processor's outputs, with what only ``grid`` knows."""
        ((frames, high, wide),) = made["video_grid_thw"].tolist()
        merge = self.processor.merge_size
        return Grid(high // merge, wide // merge, frames, grid.interval)

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower from the processor's outputs: each frame is a grid of one frame."""
        ((frames, high, wide),) = made["video_grid_thw"].tolist()
        return {
            "pixel_values": made["pixel_values_videos"],
            "image_grid_thw": torch.tensor([[1, high, wide]] * frames),
        }


class TimedVideoTokens(VideoTokens):
    """Video tokens of a model whose frames are each between marks, behind their time in words."""

    mark_keys = ("vision_start_token_id", "vision_end_token_id")
    """Keys of the tokens before and after a frame."""
    titles_follow = False
    """True if the time of a frame is behind it."""

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context, arguments)
        self._first, self._last = self._frame_marks()

    def _frame_marks(self) -> list[int]:
        """Return the ids of the tokens before and after a frame."""
        return config_ids(self.context.config, *self.mark_keys)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        found: list[int] = []
        frame = [self._first, *[self.token] * (grid.rows * grid.columns), self._last]
        for number, seconds in enumerate(grid.times):
            title = self.context.spell(self._title(number, seconds))
            found += [*frame, *title] if self.titles_follow else [*title, *frame]
        return found

    def _title(self, number: int, seconds: float) -> str:
        """Return the time of frame ``number`` in words."""
        return f"<{seconds:.1f} seconds>"

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per frame."""
        starts = where[:: grid.rows * grid.columns]
        return [ImageSpan(int(start), grid.rows, grid.columns) for start in starts]


class FrameImageTokens(TimedVideoTokens):
    """Video tokens of a model whose frames are images, each in front of its time in words."""

    placeholder = IMAGE
    mark_keys = ("image_start_token_id", "image_end_token_id")
    titles_follow = True

    def _times(self, facts: VideoFacts, indices: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of frames, each that of the first which is merged into it."""
        return tuple(index / facts.fps for index in indices[:: self.processor.temporal_patch_size])

    def _title(self, number: int, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


class SecondFrameTokens(FrameImageTokens):
    """The same with a whole number as the time, rounded down, without a unit."""

    def _title(self, number: int, seconds: float) -> str:
        return str(int(seconds))


class _UnmergedFrames(VideoTokens):
    """Methods of video tokens whose processor merges neither frames nor patches."""

    def _resized_sides(self) -> Callable[[int, int, int], tuple[int, int]]:
        self.processor.temporal_patch_size = self.processor.merge_size = 1  # which it lacks
        return lambda height, width, frames: self._frame_sides(height, width)

    @abstractmethod
    def _frame_sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a frame."""

    def _count_patches(self, facts: VideoFacts, indices: Sequence[int], tokens: int) -> int:
        return len(indices) * tokens


class PooledVideoTokens(_UnmergedFrames, TimedVideoTokens):
    """Video tokens of Gemma 4: each frame is between marks, behind its minutes and seconds."""

    mark_keys = POOLED_MARKS

    def _resized_sides(self) -> Callable[[int, int, int], tuple[int, int]]:
        self._pooled = pooled_sides(self.processor)
        return super()._resized_sides()

    def _frame_sides(self, height: int, width: int) -> tuple[int, int]:
        return self._pooled(height, width)

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees: all of a video with fewer than the processor takes."""
        if (self.processor.num_frames or 0) > facts.frames:
            return tuple(range(facts.frames))
        return super()._sample(facts)

    def _title(self, number: int, seconds: float) -> str:
        return f"{' ' if number else ''}{int(seconds // 60):02d}:{int(seconds % 60):02d} "

    def _output_grid(self, made: Mapping[str, Tensor], grid: Grid) -> Grid:
        positions = made["video_position_ids"]
        (first, *_) = grids_of_positions(positions[:1], [int(made["num_soft_tokens_per_video"][0])])
        return replace(first, frames=len(positions))

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return without_padding(made["pixel_values_videos"], made["video_position_ids"])


class _EvenFrames(_UnmergedFrames):
    """Methods of video tokens with a fixed number per frame, and frames at even distances."""

    _length: int

    def _frame_sides(self, height: int, width: int) -> tuple[int, int]:
        return 1, self._length

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees, at even distances."""
        count = self.processor.num_frames or int(facts.frames / facts.fps * self.processor.fps)
        most = self._arguments.video_max_frames or facts.frames
        count = max(min(count, most, facts.frames), 1)
        return tuple(map(int, self.processor.sample_frames(metadata=_metadata(facts), num_frames=count)))

    def _output_grid(self, made: Mapping[str, Tensor], grid: Grid) -> Grid:
        return grid


class NumberedFrameTokens(_EvenFrames, FrameImageTokens):
    """Video tokens of InternVL: each frame is an image of one tile, behind its number.

    The title of the first frame is in the rendered chat already; see `with_image_marks`.
    """

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context, arguments)
        self._length = context.fields.get("image_seq_length", 256)

    def _frame_marks(self) -> list[int]:
        return self.context.ids(*INTERNVL_MARKS)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        found: list[int] = []
        for number in range(1, grid.frames + 1):
            if number > 1:
                found += self.context.spell(f"\n{frame_title(number)}")
            found += [self._first, *[self.token] * grid.columns, self._last]
        return found

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": made["pixel_values_videos"][0]}


class PooledFrameTokens(_EvenFrames):
    """Video tokens of LLaVA-OneVision: a fixed number for each frame, one after the other, and one at the end."""

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context, arguments)
        assert context.family.tokens_per_frame is not None, "pooled frames have a fixed number of features"
        self._length = context.family.tokens_per_frame(context.config)

    def grid(self, facts: VideoFacts) -> Grid:
        """Return the grid of a video, as one frame with all its tokens."""
        return Grid(1, super().grid(facts).tokens + 1, 1)

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        frames = made["pixel_values_videos"]
        return {
            "pixel_values": frames,
            "image_sizes": torch.tensor([frames.shape[-2:]]),
            "batch_num_images": torch.tensor([-frames.shape[1]]),
        }


class SliceVideoTokens(_UnmergedFrames):
    """Video tokens of MiniCPM-V: each frame is an image with slices, all behind the number of the video.

    Args:
        context: Video processor and model.
        arguments: Options of the run.
        numbered: The number of the video is in front of it.

    Raises:
        UsageError: The options or the processor are not supported.
    """

    def __init__(self, context: MediaContext, arguments: DataArguments, *, numbered: bool) -> None:
        processor, self._slices = context.processor, SliceTokens(context, numbered=numbered)
        processor.downsample_mode = context.fields.get("downsample_mode", "16x")
        super().__init__(context, arguments)
        if arguments.video_fps not in (None, self.list_fps):
            raise UsageError(
                f"video_fps is {arguments.video_fps:g}; expected 1, because {type(processor).__name__} takes one frame "
                "of each second; leave it out"
            )
        if processor.stack_frames > 1:
            raise UsageError(
                f"video_preprocessor_config.json: stack_frames is {processor.stack_frames}; expected 1: frames "
                "that are stacked into one are not supported"
            )
        processor.max_num_frames = min(
            processor.max_num_frames, arguments.video_max_frames or processor.max_num_frames
        )

    @property
    def list_fps(self) -> float:
        """Frames per second of a list of images, all of which the processor takes at this rate."""
        return 1.0

    def _frame_sides(self, height: int, width: int) -> tuple[int, int]:
        return 1, self._slices.grid(height, width).columns

    def grid(self, facts: VideoFacts) -> Grid:
        """Return the grid of a video.

        Raises:
            McaError: The video is too long.
        """
        self._require_short(facts)
        frame = self._slices.grid(facts.height, facts.width)
        return replace(frame, frames=len(self._sampled(facts)))

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees, one of each second."""
        found = self.processor.sample_frames(metadata=_metadata(facts))
        return tuple(min(int(index), facts.frames - 1) for index in found)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        return self._slices.ids(grid)

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location for each frame and each slice."""
        return locate_runs(where)

    def _output_grid(self, made: Mapping[str, Tensor], grid: Grid) -> Grid:
        sizes, layouts = made["target_sizes_videos"], made["grids_videos"].tolist()
        of_frame = sizes[: len(sizes) // len(layouts)].tolist()  # the whole, and its slices
        (rows, columns), *_ = layouts
        found = self._slices.sliced(rows, columns, [self.context.tokens_of_size(*size) for size in of_frame])
        return replace(found, frames=len(layouts))

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = made["target_sizes_videos"]
        return {"pixel_values": split_patches(made["pixel_values_videos"]), "target_sizes": sizes}


def _metadata(facts: VideoFacts) -> Upstream:
    from transformers.video_utils import VideoMetadata

    size = {"width": facts.width, "height": facts.height}
    return VideoMetadata(facts.frames, fps=facts.fps, duration=facts.seconds, **size)


def _apply_options(processor: ImageProcessor, arguments: DataArguments, fps: float) -> None:
    if arguments.video_fps is not None:
        processor.fps, processor.num_frames = arguments.video_fps, None
    elif processor.fps is None and processor.num_frames is None:
        processor.fps = fps
    if (most := arguments.video_max_frames) is not None:
        if most < processor.temporal_patch_size:
            raise UsageError(
                f"video_max_frames is {most}; expected at least {processor.temporal_patch_size}, the frames that the "
                "model merges"
            )
        if hasattr(processor, "max_frames"):
            processor.max_frames = most
        if hasattr(processor, "min_frames"):
            processor.min_frames = min(most, processor.min_frames)
        processor.num_frames = processor.num_frames and min(most, processor.num_frames)
    if getattr(processor, "cap_pixels_per_frame", False) is None:
        processor.cap_pixels_per_frame = False  # the default, of which transformers warns


_KINDS: Mapping[VideoTokenKind, type[VideoTokens]] = {
    "together": VideoTokens,
    "timestamps": TimedVideoTokens,
    "second_after": SecondFrameTokens,
    "seconds_after": FrameImageTokens,
    "minutes": PooledVideoTokens,
    "numbered": NumberedFrameTokens,
    "pooled": PooledFrameTokens,
    "slices": SliceVideoTokens,
}


def video_tokens(
    config: McaModelConfig,
    directories: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
) -> VideoTokens:
    """Return the video tokens of a model, whose video processor is in one of ``directories``.

    Raises:
        UsageError: The model does not support videos, a package is missing, or there is no processor.
    """
    fields = media_fields(config, tokenizer)
    part = get_family(config.model_type).vision if fields is not None else None
    if part is None or part.video_tokens is None:
        raise UsageError(f"a {config.model_type} model does not support videos; remove them from the rows")
    require_placeholder(VIDEO, config, fields)
    require_video_packages()
    kind = _KINDS[part.video_tokens]
    token = require_placeholder(kind.placeholder, config, fields)
    context = MediaContext(load_processor(directories, VIDEO), token, config, tokenizer)
    if kind is SliceVideoTokens:
        numbered = getattr(load_processor(directories, IMAGE), "use_image_id", True)  # as in transformers
        return SliceVideoTokens(context, arguments, numbered=numbered)
    return kind(context, arguments)


def positions_per_second(config: McaModelConfig) -> float | None:
    """Return the time positions of a second of video; None: each frame has one."""
    part, fields = get_family(config.model_type).vision, config.vision_fields or {}
    if part is None or part.tokens_per_second is None:
        return None
    if part.video_rules is not None:
        return float(fields.get("position_id_per_seconds", part.tokens_per_second))
    return float(fields.get("vision_config", {}).get("tokens_per_second", part.tokens_per_second))


def frame_title(number: int) -> str:
    """Return InternVL's text before a frame of a video."""
    return f"Frame{number}: "
