"""Videos that a row names or contains: facts of the container, and chosen frames, decoded by PyAV.

PyAV reads from a file object and only formats of single files, so that no video can name other files or addresses.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError, UsageError
from mca_train.data.audio_files import AudioFacts, require_finite, resample
from mca_train.data.encoded_file import EncodedFile
from mca_train.data.image_files import ImageFile, open_image
from mca_train.data.message_parts import VIDEO
from mca_train.data.row_paths import RowPaths
from mca_train.types import Upstream

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,gif,h264,hevc"
"""Containers of one file; playlists (hls, concat, dash) would open others."""
_ADDED_SECONDS = 0.2
"""Largest difference between the sound that a container counts and what can be decoded; it is cut, or filled."""
_TRAILING = 2
"""Frames at the end that a container may count and that cannot be decoded; the last frame replaces them."""


@dataclass(frozen=True)
class VideoFacts:
    """Facts of a video, of its container and its first frame.

    Args:
        frames: Number of frames.
        fps: Frames per second.
        height: Pixels of an oriented frame.
        width: The same.
        sound: Facts of the sound; None: there is none, or it is not used.
    """

    frames: int
    fps: float
    height: int
    width: int
    sound: AudioFacts | None = None

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.frames / self.fps


class VideoFile(EncodedFile):
    """Video in a file, at a URL, or in the row."""

    medium = VIDEO
    alternative = "a list of images, "

    def facts(self, *, sound: bool = False) -> VideoFacts:
        """Return the facts of the video. Packets are counted where the container has no number of frames.

        Args:
            sound: Also return the facts of the first audio stream.

        Raises:
            McaError: The file is missing, or no video.
        """
        with self._opened() as container:
            stream = container.streams.video[0]
            frames, rate = stream.frames, stream.average_rate or stream.guessed_rate
            if not frames:
                frames = sum(1 for packet in container.demux(stream) if packet.size)
                container.seek(0)
            first = next(container.decode(stream), None)
            if first is None or not rate:
                lacking = "no frame that can be decoded" if first is None else "no frame rate"
                raise McaError(f"video {self.place} has {lacking}; encode it again, or remove the row")
            sides = (first.height, first.width)
            height, width = sides if _quarter_turns(first) % 2 == 0 else sides[::-1]
            sound_header = _read_sound_header(container) if sound else None
            return VideoFacts(max(frames, 1), float(rate), height, width, sound_header)

    def sound(self, rate: int) -> NDArray[np.float32]:
        """Return the mean of all channels of the first audio stream, resampled: ``[samples]``.

        Raises:
            McaError: There is no sound, or its length differs from the container's by more than encoders add.
        """
        from av.audio.resampler import AudioResampler

        facts = self.facts(sound=True).sound
        if facts is None:
            raise McaError(
                f"video {self.place} has no sound, which it had before; do not change files of a run"
            )
        with self._opened() as container:
            as_floats = AudioResampler(format="fltp")
            parts = [
                part.to_ndarray().mean(0)
                for frame in (*container.decode(container.streams.audio[0]), None)
                for part in as_floats.resample(frame)
            ]
        mono = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if abs(len(mono) - facts.frames) > _ADDED_SECONDS * facts.rate:
            raise McaError(
                f"video {self.place}: {len(mono)} of {facts.frames} samples of its sound can be decoded; the file is "
                "damaged; encode it again, or remove the row"
            )
        require_finite(mono, f"video {self.place}, its sound")
        whole = np.pad(mono[: facts.frames], (0, max(facts.frames - len(mono), 0)))
        return resample(whole.astype(np.float32), facts, rate)

    def frames(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames at ascending ``indices``, in RGB and oriented: ``[frames, height, width, 3]``.

        Raises:
            McaError: As in `facts`, or frames cannot be decoded.
        """
        from av.video.reformatter import VideoReformatter

        wanted, found = set(indices), dict[int, NDArray[np.uint8]]()
        with self._opened() as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            # a frame's own conversion may wait for threads of the process that a loader's worker was forked from
            number, colours = -1, VideoReformatter()
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted or number + _TRAILING >= max(wanted):
                    pixels = colours.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    found[number] = np.rot90(pixels, _quarter_turns(frame))
                if number >= max(wanted):
                    break
        if not found or max(wanted) > number + _TRAILING:
            raise McaError(
                f"video {self.place}: {number + 1} frames can be decoded, and frame {max(wanted)} is needed; the file "
                "is damaged; encode it again, or remove the row"
            )
        return np.stack([found[min(index, number)] for index in indices])

    @contextmanager
    def _opened(self) -> Iterator[Upstream]:
        """Open the container; errors of PyAV and of the system name the video."""
        require_video_packages()
        import av

        with (
            self.read_errors(av.FFmpegError, EOFError, reader="PyAV"),
            self.open() as stream,
            av.open(stream, options={"format_whitelist": _FORMATS}) as container,
        ):
            if not container.streams.video:
                raise McaError(f"video {self.place} has sound and no pictures; remove it from the row")
            yield container


@dataclass(frozen=True)
class FrameFiles:
    """Video that a row gives as a list of images, all of one size.

    Args:
        images: Frames in order.
        fps: Frames per second.
    """

    images: tuple[ImageFile, ...]
    fps: float

    @property
    def place(self) -> str:
        """Return a description for errors."""
        return f"of {len(self.images)} images, the first {self.images[0].place}"

    def facts(self, *, sound: bool = False) -> VideoFacts:
        """Return the facts of the video, with the size of its first image, and no ``sound``."""
        return VideoFacts(len(self.images), self.fps, *self.images[0].size())

    def frames(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames at ``indices``: ``[frames, height, width, 3]``.

        Raises:
            McaError: An image cannot be read, or has another size than the first.
        """
        first = self.images[0].size()  # `facts` has it, and the first image may not be among ``indices``
        found = [np.asarray(self.images[index].pixels()) for index in indices]
        for index, frame in zip(indices, found, strict=True):
            if frame.shape[:2] != first:
                sizes = " and ".join(f"{wide} x {high}" for high, wide in (first, frame.shape[:2]))
                raise McaError(
                    f"video {self.place}: image {index} has another size ({sizes}); make them equal"
                )
        return np.stack(found)


Video = VideoFile | FrameFiles


def _read_sound_header(container: Upstream) -> AudioFacts | None:
    """Return the facts of the first audio stream; packets are counted where the container has no duration of it."""
    streams = container.streams.audio
    if not streams or not streams[0].rate:
        return None
    stream, duration = streams[0], streams[0].duration
    if not duration:
        container.seek(0)
        duration = sum(packet.duration or 0 for packet in container.demux(stream) if packet.size)
    samples = round(float(duration * stream.time_base) * stream.rate)
    return AudioFacts(samples, stream.rate) if samples else None


def require_video_packages() -> None:
    """Raise a `UsageError` unless the packages of the extra ``video`` are installed."""
    if missing := [name for name in ("av", "torchvision") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"rows have videos, which need {' and '.join(missing)}; install mca-train[video]")


def open_video(value: object, paths: RowPaths, fps: Callable[[], float]) -> Video:
    """Return the video of a row: a list of images, whose rate ``fps`` returns, or as `EncodedFile.read`."""

    def of_images(own: object) -> FrameFiles | None:
        if not isinstance(own, list | tuple) or not own:
            return None
        return FrameFiles(tuple(open_image(each, paths) for each in own), fps())

    return VideoFile.read(value, paths, of_images)


def _quarter_turns(frame: Upstream) -> int:
    """Return how often a frame is to be turned to the left by 90 degrees; cameras write it into the file."""
    return round(getattr(frame, "rotation", 0) / 90) % 4
