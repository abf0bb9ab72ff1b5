"""Videos with their sound, whose tokens alternate with those of the frames (Qwen 2.5 Omni, Qwen 3 Omni).

Qwen 2.5 Omni   chunks of two seconds, first the frames of a chunk, then its sound
Qwen 3 Omni     in the order of time; a frame is in front of the sound of its time
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.media import ImageSpan
from mca_models.templates import get_family
from mca_train.config.arguments import DataArguments
from mca_train.data.audio_tokens import AudioTokens, audio_tokens
from mca_train.data.medium_tokens import Grid, config_ids
from mca_train.data.message_parts import AUDIO, VIDEO
from mca_train.data.video_files import Video, VideoFacts, VideoFile
from mca_train.data.video_tokens import VideoTokens, positions_per_second, video_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Run = tuple[str, int, int]
"""Medium, first token of it, and one past the last."""


class SoundingVideoTokens:
    """Tokens of videos with their sound; those of a video without sound are its frames'.

    Args:
        videos: Tokens of the frames.
        audio: Tokens of the sound.
        marks: Ids of the tokens before and after a clip, which are here around frames and sound.
        per_second: Time positions of a second; the sound has a token for each.
        chunk: Time positions of a chunk; None: the order is that of time.
    """

    uses_sound = True

    def __init__(
        self,
        videos: VideoTokens,
        audio: AudioTokens,
        marks: Sequence[int],
        per_second: float,
        chunk: int | None,
    ) -> None:
        self._videos, self._audio, self._marks = videos, audio, marks
        self._per_second, self._chunk = per_second, chunk

    @property
    def list_fps(self) -> float:
        """Frames per second of a list of images."""
        return self._videos.list_fps

    def grid(self, facts: VideoFacts) -> Grid:
        """Return the grid of a video.

        Raises:
            McaError: The video or its sound is too long, or the processor does not support its size.
        """
        grid = self._videos.grid(facts)
        if facts.sound is None:
            return grid
        return replace(grid, sound=self._audio.grid(facts.sound).tokens)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        if not grid.sound:
            return self._videos.ids(grid)
        tokens = {VIDEO: self._videos.token, AUDIO: self._audio.token}
        found = [self._marks[0]]
        for medium, first, stop in self._runs(grid):
            found += [tokens[medium]] * (stop - first)
        return [*found, self._marks[1]]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the locations of the runs of a video and its sound from the indices ``where`` of the placeholders."""
        if not grid.sound:
            return self._videos.locate(where, grid)
        (video,) = self._videos.locate(where, replace(grid, sound=0))
        sound, shared = ImageSpan(video.start, 1, grid.sound, medium="audio"), self._chunk is not None
        found, token = [], 0
        for medium, first, stop in self._runs(grid):
            span = replace(video if medium == VIDEO else sound, origin=video.start, shared_marks=shared)
            found.append(replace(span, start=int(where[token]), run=(first, stop)))
            token += stop - first
        return found

    def tensors(self, video: Video, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of both towers for ``video``.

        Raises:
            McaError: The video cannot be read, or has changed since its placeholders were counted.
        """
        found = self._videos.tensors(video, replace(grid, sound=0))
        if not grid.sound:
            return found
        assert isinstance(video, VideoFile), "a list of images has no sound"
        samples = video.sound(self._audio.processor.sampling_rate)
        sound = Grid.audio(grid.sound)
        return found | self._audio.spectrogram(samples, sound, f"the sound of video {video.place}")

    def _runs(self, grid: Grid) -> list[Run]:
        """Return the runs of tokens of the frames and the sound, in order."""
        frame = grid.rows * grid.columns
        times = [number // frame * grid.interval * self._per_second for number in range(grid.frames * frame)]
        if self._chunk is not None:
            return chunked_runs(times, grid.sound, self._chunk)
        return timed_runs(times, grid.sound)


def chunked_runs(times: Sequence[float], sound: int, chunk: int) -> list[Run]:
    """Return runs of chunks of ``chunk`` time positions: of each first the frames, then the sound.

    Args:
        times: Time position of each token of the frames.
        sound: Tokens of the sound, at the positions 0, 1, ...
        chunk: Time positions of a chunk.
    """
    found: list[Run] = []
    for pictures, sounds in zip_longest(_chunks(times, chunk), _chunks(range(sound), chunk)):
        found += [] if pictures is None else [(VIDEO, *pictures)]
        found += [] if sounds is None else [(AUDIO, *sounds)]
    return found


def _chunks(times: Sequence[float], chunk: int) -> list[tuple[int, int]]:
    """Return first and last of each chunk as transformers counts them: a token begins at most one."""
    starts = [0]
    for token, time in enumerate(times):
        if time >= len(starts) * chunk:
            starts.append(token)
    return [*zip(starts, [*starts[1:], len(times)], strict=True)]


def timed_runs(times: Sequence[float], sound: int) -> list[Run]:
    """Return runs in the order of time, frames before sound of the same time.

    Args:
        times: Time position of each token of the frames.
        sound: Tokens of the sound, at the positions 0, 1, ...
    """
    tokens = [(time, VIDEO, number) for number, time in enumerate(times)]
    tokens += [(float(number), AUDIO, number) for number in range(sound)]
    tokens.sort(key=lambda each: (each[0], each[1] == AUDIO))
    found = []
    for medium, group in groupby(tokens, lambda each: each[1]):
        numbers = [number for _, _, number in group]
        found.append((medium, numbers[0], numbers[-1] + 1))
    return found


def sounding_video_tokens(
    config: McaModelConfig,
    directories: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
) -> VideoTokens | SoundingVideoTokens:
    """Return the video tokens of a model, with their sound if ``arguments`` ask for it.

    Raises:
        UsageError: The model does not support videos, or not with sound; or a package or a processor is missing.
    """
    frames = video_tokens(config, directories, tokenizer, arguments)
    if not arguments.use_audio_in_video:
        return frames
    part = get_family(config.model_type).vision
    per_second = positions_per_second(config)
    if part is None or part.video_rules is None or per_second is None:
        raise UsageError(
            f"use_audio_in_video: a {config.model_type} model takes no sound between the frames of a video; remove the "
            "key"
        )
    seconds = (config.vision_fields or {}).get("seconds_per_chunk", 2.0)
    chunk = int(per_second * seconds) if part.video_rules.sound == "chunks" else None
    sound = audio_tokens(config, directories, tokenizer, arguments)
    marks = config_ids(config, "audio_start_token_id", "audio_end_token_id")
    return SoundingVideoTokens(frames, sound, marks, per_second, chunk)
