"""Audio clips that a row names or contains: facts of the header, and samples, decoded by soundfile."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError, UsageError
from mca_train.data.encoded_file import EncodedFile
from mca_train.data.message_parts import AUDIO
from mca_train.types import Upstream


@dataclass(frozen=True)
class AudioFacts:
    """Facts of an audio clip, of its header.

    Args:
        frames: Samples of each channel.
        rate: Samples per second.
    """

    frames: int
    rate: int

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.frames / self.rate

    def frames_at(self, rate: int) -> int:
        """Return the samples of the clip at another rate, rounded up."""
        return -(-self.frames * rate // self.rate)


class AudioFile(EncodedFile):
    """Audio clip in a file, at a URL, or in the row."""

    medium = AUDIO
    base64_keys = ("base64", "data")  # of OpenAI's input_audio

    def facts(self) -> AudioFacts:
        """Return the facts of the clip.

        Raises:
            McaError: The file is missing, or no audio.
        """
        with self._opened() as sound:
            return AudioFacts(sound.frames, sound.samplerate)

    def samples(self, rate: int) -> NDArray[np.float32]:
        """Return the mean of all channels, resampled: ``[samples]``.

        Raises:
            McaError: As in `facts`, or the file has fewer samples than its header states.
        """
        with self._opened() as sound:
            facts = AudioFacts(sound.frames, sound.samplerate)
            mono = sound.read(dtype="float32", always_2d=True).mean(1)
        if len(mono) != facts.frames:
            raise McaError(
                f"audio {self.place}: {len(mono)} of {facts.frames} samples can be decoded; the file is damaged; "
                "encode it again, or remove the row"
            )
        require_finite(mono, f"audio {self.place}")
        return resample(mono, facts, rate)

    @contextmanager
    def _opened(self) -> Iterator[Upstream]:
        """Open the file; errors of soundfile and of the system name the clip."""
        require_audio_packages()
        import soundfile

        with (
            self.read_errors(soundfile.SoundFileError, TypeError, reader="soundfile"),
            self.open() as stream,
            soundfile.SoundFile(stream) as sound,
        ):
            yield sound


def require_finite(mono: NDArray[np.float32], name: str) -> None:
    """Raise an error for samples that would make the loss NaN; files of floating-point samples may have such.

    Args:
        mono: Samples.
        name: Name of their file, for errors.

    Raises:
        McaError: A sample is infinite or not a number.
    """
    if faults := int((~np.isfinite(mono)).sum()):
        raise McaError(
            f"{name}: {faults} of {len(mono)} samples are infinite or not a number; encode it again, or remove the row"
        )


def resample(mono: NDArray[np.float32], facts: AudioFacts, rate: int) -> NDArray[np.float32]:
    """Return the samples ``mono`` of a clip at another rate, with the length that ``facts`` give."""
    import soxr

    found: NDArray[np.float32] = (
        mono if facts.rate == rate else soxr.resample(mono, facts.rate, rate, quality="HQ")
    )
    length = facts.frames_at(rate)
    return np.pad(found[:length], (0, max(length - len(found), 0)))


def require_audio_packages() -> None:
    """Raise a `UsageError` unless the packages of the extra ``audio`` are installed."""
    if missing := [name for name in ("soundfile", "soxr") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"rows have audio, which needs {' and '.join(missing)}; install mca-train[audio]")
