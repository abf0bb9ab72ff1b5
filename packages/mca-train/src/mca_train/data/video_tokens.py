"""Frames, token counts and pixel tensors of videos, from the video processor of the checkpoint.

`video_processors` chooses one for a model.

Qwen 2 VL, 2.5 VL   the frames follow one another, in Qwen 2.5 VL with time positions in seconds
Qwen 2.5, 3 Omni    the same, in seconds of the requested rate, and text behind the last frame's time
Qwen 3 VL, 3.5      each frame is between two marks, behind its time in words
GLM-4V, 4.6V        each frame is an image, in front of its time
InternVL            each frame is an image, behind its number
Gemma 4             each frame is between two marks, behind its minutes and seconds
MiniCPM-V           each frame is an image with slices, all behind the number of the video
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_models.media import ImageSpan
from mca_models.megatron.features.media_features import split_patches
from mca_models.templates.parts.vision_tower import VideoRules
from mca_train.data.grids import Grid
from mca_train.data.image_processors import frame_title
from mca_train.data.image_slices import SliceTokens
from mca_train.data.image_tokens import locate_runs, require_unchanged
from mca_train.data.patch_grids import resized_sides
from mca_train.data.pooled_patches import grids_of_positions, pooled_sides, without_padding
from mca_train.data.video_files import Video, VideoFacts
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FPS = 2.0
"""Frames per second where neither the run nor the checkpoint gives a number, as in Qwen's own tools."""


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """Options of a run for its videos; see `DataArguments`."""

    fps: float | None = None
    max_frames: int | None = None
    max_seconds: float | None = None
    sound: bool = False


class VideoTokens:
    """Video tokens of a model whose frames follow one another.

    Args:
        processor: Hugging Face video processor, which is changed to the options.
        token: Id of the placeholder token.
        options: Options of the run.
        tokens_per_second: Time positions of a second; None: one for each frame.
        rules: Rules of the family; None: those of the processor.

    Raises:
        UsageError: The options do not fit the processor.
    """

    uses_sound = False
    """The sound of videos is used."""

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        options: VideoOptions,
        tokens_per_second: float | None = None,
        rules: VideoRules | None = None,
    ) -> None:
        self.token, self.processor = token, processor
        self.before: Sequence[int] = ()
        self.after: Sequence[int] = ()
        self._options, self._tokens_per_second, self._rules = options, tokens_per_second, rules
        if rules is not None:
            least, most = rules.pixels
            processor.size = type(processor.size)(shortest_edge=least, longest_edge=most)
        self._sides = self._resized_sides(processor)
        self._sampled = lru_cache(maxsize=1 << 12)(self._sample)
        _apply_options(processor, options, DEFAULT_FPS if rules is None else rules.fps)

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
        """Raise an error for a video that is too long."""
        limit = self._options.max_seconds
        if limit is not None and facts.seconds > limit:
            raise McaError(
                f"it lasts {facts.seconds:.1f} seconds, more than video_max_seconds {limit:g}; cut it, raise "
                "video_max_seconds, or remove the row"
            )

    def _resized_sides(self, processor: ImageProcessor) -> Callable[[int, int, int], tuple[int, int]]:
        """Return the function from height, width and number of frames to the rows and columns of tokens."""
        return resized_sides(processor)

    def _count_patches(self, facts: VideoFacts, indices: Sequence[int], tokens: int) -> int:
        """Return the number of patches that the processor makes, of frames with as many ``tokens`` each."""
        patches: int = self.processor.get_num_of_video_patches(len(indices), facts.height, facts.width, {})
        return patches

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees."""
        from transformers.video_utils import VideoMetadata

        step, most = self.processor.temporal_patch_size, self._options.max_frames
        if facts.frames < step:
            return tuple(range(facts.frames))
        known = VideoMetadata(
            total_num_frames=facts.frames,
            fps=facts.fps,
            width=facts.width,
            height=facts.height,
            duration=facts.seconds,
        )
        found = [int(index) for index in self.processor.sample_frames(metadata=known)]
        if most is not None and len(found) > most:  # of a processor without a limit
            found = [
                found[place]
                for place in np.linspace(0, len(found) - 1, most - most % step).round().astype(int)
            ]
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

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens before and after a video."""
        return self.before, self.after

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        return [self.token] * grid.tokens

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the locations of a video from the indices ``where`` of its placeholders."""
        span = ImageSpan(int(where[0]), grid.rows, grid.columns, grid.frames, grid.interval)
        if self._rules is None:
            return [span]
        per_second = self._tokens_per_second or 1.0
        return [replace(span, per_second=per_second, past_time=True, exact=self._rules.exact)]

    def _processed(self, video: Video, grid: Grid) -> Mapping[str, Tensor]:
        """Return the processor's inputs of the sampled frames of ``video``, whose placeholders ``grid`` counted."""
        facts = video.facts()
        require_unchanged(f"video {video.place}", grid, self.grid(facts))
        inputs: Mapping[str, Tensor] = self.processor(
            videos=[video.frames(self._sampled(facts))],
            do_sample_frames=False,
            input_data_format="channels_last",
            return_tensors="pt",
        )
        return inputs

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``: its frames, each a grid of one frame.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        made = self._processed(video, grid)
        ((frames, high, wide),) = made["video_grid_thw"].tolist()
        merge = self.processor.merge_size
        require_unchanged(
            f"video {video.place}", grid, Grid(high // merge, wide // merge, frames, grid.interval)
        )
        return {
            "pixel_values": made["pixel_values_videos"],
            "image_grid_thw": torch.tensor([[1, high, wide]] * frames),
        }


class TimedVideoTokens(VideoTokens):
    """Video tokens of a model whose frames are each between marks, behind their time in words.

    Args:
        processor: As in `VideoTokens`.
        token: Id of the placeholder token.
        options: Options of the run.
        marks: Ids of the tokens before and after a frame.
        tokenizer: Tokenizer of the times.
    """

    titles_follow = False
    """True if the time of a frame is behind it."""

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        options: VideoOptions,
        marks: tuple[int, int],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> None:
        super().__init__(processor, token, options)
        self._marks, self._tokenizer = marks, tokenizer

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        found: list[int] = []
        frame = [self._marks[0], *[self.token] * (grid.rows * grid.columns), self._marks[1]]
        for number, seconds in enumerate(grid.times):
            title = self._tokenizer(self._title(number, seconds), add_special_tokens=False)["input_ids"]
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
    """Video tokens of a model whose frames are images, each in front of its time in words.

    Args:
        processor: As in `VideoTokens`.
        token: Id of the placeholder token of images.
        options: Options of the run.
        marks: Ids of the tokens before and after an image.
        tokenizer: Tokenizer of the times.
        whole: The time is a whole number, rounded down, without a unit.
    """

    titles_follow = True

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        options: VideoOptions,
        marks: tuple[int, int],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        whole: bool,
    ) -> None:
        super().__init__(processor, token, options, marks, tokenizer)
        self._whole = whole

    def _times(self, facts: VideoFacts, indices: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of frames, each that of the first which is merged into it."""
        return tuple(index / facts.fps for index in indices[:: self.processor.temporal_patch_size])

    def _title(self, number: int, seconds: float) -> str:
        return str(int(seconds)) if self._whole else f"{seconds:.1f} seconds"


class PooledVideoTokens(TimedVideoTokens):
    """Video tokens of Gemma 4: each frame is between marks, behind its minutes and seconds.

    Args:
        processor: As in `VideoTokens`.
        token: Id of the placeholder token.
        options: Options of the run.
        marks: Ids of the tokens before and after a frame.
        tokenizer: Tokenizer of the times.
    """

    def _resized_sides(self, processor: ImageProcessor) -> Callable[[int, int, int], tuple[int, int]]:
        """Return the function from height, width and number of frames to the rows and columns of tokens."""
        processor.temporal_patch_size = processor.merge_size = 1  # which it lacks
        sides = pooled_sides(processor)
        return lambda height, width, frames: sides(height, width)

    def _count_patches(self, facts: VideoFacts, indices: Sequence[int], tokens: int) -> int:
        return len(indices) * tokens

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees: all of a video with fewer than the processor takes."""
        if (self.processor.num_frames or 0) > facts.frames:
            return tuple(range(facts.frames))
        return super()._sample(facts)

    def _title(self, number: int, seconds: float) -> str:
        return f"{' ' if number else ''}{int(seconds // 60):02d}:{int(seconds % 60):02d} "

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``: its frames, each an image.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        made = self._processed(video, grid)
        positions = made["video_position_ids"]
        (first, *_) = grids_of_positions(positions[:1], [int(made["num_soft_tokens_per_video"][0])])
        require_unchanged(f"video {video.place}", grid, replace(first, frames=len(positions)))
        return without_padding(made["pixel_values_videos"], positions)


class _EvenFrames(VideoTokens):
    """Methods of video tokens with a fixed number per frame, and frames at even distances."""

    _length: int

    def _resized_sides(self, processor: ImageProcessor) -> Callable[[int, int, int], tuple[int, int]]:
        """Return the function from height, width and number of frames to the rows and columns of tokens."""
        processor.temporal_patch_size = processor.merge_size = 1  # which it lacks
        return lambda height, width, frames: (1, self._length)

    def _count_patches(self, facts: VideoFacts, indices: Sequence[int], tokens: int) -> int:
        return len(indices) * tokens

    def _sample(self, facts: VideoFacts) -> tuple[int, ...]:
        """Return the indices of the frames that the model sees, at even distances."""
        from transformers.video_utils import VideoMetadata

        count = self.processor.num_frames or int(facts.frames / facts.fps * self.processor.fps)
        most = self._options.max_frames or facts.frames
        known = VideoMetadata(total_num_frames=facts.frames, fps=facts.fps)
        count = max(min(count, most, facts.frames), 1)
        return tuple(map(int, self.processor.sample_frames(metadata=known, num_frames=count)))


class NumberedFrameTokens(_EvenFrames, FrameImageTokens):
    """Video tokens of InternVL: each frame is an image of one tile, behind its number.

    The title of the first frame is in the rendered chat already; see `with_image_marks`.

    Args:
        processor: As in `VideoTokens`.
        token: Id of the placeholder token of images.
        options: Options of the run.
        marks: Ids of the tokens before and after an image.
        tokenizer: Tokenizer of the titles.
        length: Placeholders per frame.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        options: VideoOptions,
        marks: tuple[int, int],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        length: int,
    ) -> None:
        self._length = length
        super().__init__(processor, token, options, marks, tokenizer, whole=True)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        found: list[int] = []
        for number in range(1, grid.frames + 1):
            if number > 1:
                title = f"\n{frame_title(number)}"
                found += self._tokenizer(title, add_special_tokens=False)["input_ids"]
            found += [self._marks[0], *[self.token] * grid.columns, self._marks[1]]
        return found

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``: its frames, each an image.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        made = self._processed(video, grid)
        return {"pixel_values": made["pixel_values_videos"][0]}


class PooledFrameTokens(_EvenFrames):
    """Video tokens of LLaVA-OneVision: a fixed number for each frame, one after the other, and one at the end.

    Args:
        processor: As in `VideoTokens`.
        token: Id of the placeholder token.
        options: Options of the run.
        length: Placeholders per frame.
    """

    def __init__(self, processor: ImageProcessor, token: int, options: VideoOptions, length: int) -> None:
        self._length = length
        super().__init__(processor, token, options)

    def grid(self, facts: VideoFacts) -> Grid:
        """Return the grid of a video, as one frame with all its tokens."""
        return Grid(1, super().grid(facts).tokens + 1, 1)

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``: its frames, as those of a tiled image.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        frames = self._processed(video, grid)["pixel_values_videos"]
        return {
            "pixel_values": frames,
            "image_sizes": torch.tensor([frames.shape[-2:]]),
            "batch_num_images": torch.tensor([-frames.shape[1]]),
        }


class SliceVideoTokens(VideoTokens):
    """Video tokens of MiniCPM-V: each frame is an image with slices, all behind the number of the video.

    Args:
        processor: As in `VideoTokens`.
        options: Options of the run.
        slices: Tokens of a frame, with the placeholder of videos.

    Raises:
        UsageError: The options or the processor are not supported.
    """

    def __init__(self, processor: ImageProcessor, options: VideoOptions, slices: SliceTokens) -> None:
        self._slices = slices
        super().__init__(processor, slices.token, options)
        if options.fps not in (None, self.list_fps):
            raise UsageError(
                f"video_fps is {options.fps:g}; expected 1, because {type(processor).__name__} takes one frame of each "
                "second; leave it out"
            )
        if processor.stack_frames > 1:
            raise UsageError(
                f"video_preprocessor_config.json: stack_frames is {processor.stack_frames}; expected 1: frames "
                "that are stacked into one are not supported"
            )
        processor.max_num_frames = min(
            processor.max_num_frames, options.max_frames or processor.max_num_frames
        )

    @property
    def list_fps(self) -> float:
        """Frames per second of a list of images, all of which the processor takes at this rate."""
        return 1.0

    def _resized_sides(self, processor: ImageProcessor) -> Callable[[int, int, int], tuple[int, int]]:
        """Return the function from height, width and number of frames to one row of a frame's tokens."""
        processor.temporal_patch_size = processor.merge_size = 1  # which it lacks
        return lambda height, width, frames: (1, self._slices.grid(height, width).columns)

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
        from transformers.video_utils import VideoMetadata

        known = VideoMetadata(total_num_frames=facts.frames, fps=facts.fps, duration=facts.seconds)
        found = self.processor.sample_frames(metadata=known)
        return tuple(min(int(index), facts.frames - 1) for index in found)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        return self._slices.ids(grid)

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the number and the mark before a video, and the mark after it."""
        return self._slices.marks(grid)

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location for each frame and each slice."""
        return locate_runs(where)

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``video``: its frames, each an image with slices.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        made = self._processed(video, grid)
        sizes, layouts = made["target_sizes_videos"], made["grids_videos"].tolist()
        of_frame = sizes[: len(sizes) // len(layouts)].tolist()  # the whole, and its slices
        (rows, columns), *_ = layouts
        found = self._slices.sliced(rows, columns, [self._slices.features(*size) for size in of_frame])
        require_unchanged(f"video {video.place}", grid, replace(found, frames=len(layouts)))
        return {"pixel_values": split_patches(made["pixel_values_videos"]), "target_sizes": sizes}


def _apply_options(processor: ImageProcessor, options: VideoOptions, fps: float) -> None:
    if options.fps is not None:
        processor.fps, processor.num_frames = options.fps, None
    elif processor.fps is None and processor.num_frames is None:
        processor.fps = fps
    if (most := options.max_frames) is not None:
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
