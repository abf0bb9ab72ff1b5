"""Token counts and spectrograms of audio clips, from the feature extractor of the checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import ImageSpan
from mca_models.templates import get_family
from mca_train.config.arguments import DataArguments
from mca_train.data.audio_files import AudioFacts, AudioFile, require_audio_packages
from mca_train.data.medium_tokens import (
    Grid,
    MediaContext,
    MediumTokens,
    config_ids,
    load_processor,
    require_placeholder,
    require_unchanged,
)
from mca_train.data.message_parts import AUDIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AudioTokens(MediumTokens):
    """Audio tokens of a model.

    Args:
        context: Feature extractor and model.
        arguments: Options of the run.
    """

    _made_mask, _mask_dtype = "attention_mask", torch.long
    """Output of the feature extractor, and the dtype that the tower takes."""

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context)
        assert context.family.audio is not None, "a model with audio has a tower for it"
        self._tower, self._arguments = context.family.audio, arguments

    def grid(self, facts: AudioFacts) -> Grid:
        """Return the grid of a clip.

        Raises:
            McaError: The clip is too long or too short.
        """
        for limit, reason, advice in (
            (
                self._arguments.audio_max_seconds,
                "more than audio_max_seconds {:g}",
                "cut it, raise audio_max_seconds, or",
            ),
            (self._max_seconds, "and the model hears at most {:g}", "cut it, or"),
        ):
            if limit is not None and facts.seconds > limit:
                raise McaError(
                    f"it lasts {facts.seconds:.1f} seconds, {reason.format(limit)}; {advice} remove the row"
                )
        samples = facts.frames_at(self.processor.sampling_rate)
        if (count := self._tower.tokens(self.context.config, self._frames(samples))) < 1:
            raise McaError(f"it lasts {facts.seconds:.3f} seconds, too short for one token; remove the row")
        return Grid.audio(count)

    @property
    def _max_seconds(self) -> float | None:
        """Return the seconds that the model hears at most; None: any number."""
        if self._tower.unpadded or self._tower.windows is None:
            return None
        return self._tower.windows * int(self.processor.n_samples) / float(self.processor.sampling_rate)

    def _frames(self, samples: int) -> int:
        """Return the frames of a clip that its mask marks; without padding, a last one that is begun is left out."""
        hop, least = int(self.processor.hop_length), int(getattr(self.processor, "min_length", 0))
        if self._tower.mask is None:
            window = int(self.processor.n_samples)
            return -(-samples // window) * window // hop
        return max(samples, least) // hop if self._tower.unpadded else -(-samples // hop)

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the location of a clip from the indices ``where`` of its placeholders."""
        return [ImageSpan(int(where[0]), 1, grid.tokens, medium="audio")]

    def tensors(self, clip: AudioFile, grid: Grid) -> dict[str, Tensor]:
        """Return the inputs of the audio tower for ``clip``.

        Raises:
            McaError: The clip cannot be read, or has changed since its placeholders were counted.
        """
        return self.spectrogram(clip.samples(self.processor.sampling_rate), grid, f"audio {clip.place}")

    def spectrogram(self, samples: NDArray[np.float32], grid: Grid, place: str) -> dict[str, Tensor]:
        """Return the inputs of the audio tower for ``samples`` at the rate of the feature extractor.

        Raises:
            McaError: The clip at ``place`` has changed since its placeholders were counted.
        """
        rate = self.processor.sampling_rate
        require_unchanged(place, grid, self.grid(AudioFacts(len(samples), rate)))
        given = {"sampling_rate": rate, "return_attention_mask": True, "return_tensors": "pt"}
        if self._tower.mask is None:
            return {"input_features": self._joint_windows(samples, given)}
        if self._tower.unpadded:
            given |= {"padding": "longest", "truncation": False}
        made = self.processor(self._windows(samples), **given)
        mask: Tensor = made[self._made_mask]
        count = self._tower.tokens(self.context.config, int(mask.sum()))
        require_unchanged(place, grid, Grid.audio(count))
        features = torch.as_tensor(made["input_features"])
        return {"input_features": features, self._tower.mask: mask.to(self._mask_dtype)}

    def _windows(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Return the windows of a clip, each of which has its own spectrogram."""
        if self._tower.windows == 1:
            return [samples]
        size = int(self.processor.n_samples)
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def _joint_windows(self, samples: NDArray[np.float32], given: JsonObject) -> Tensor:
        """Return the windows of the spectrogram of a full clip, ``[windows, mels, frames]``."""
        size, hop = int(self.processor.n_samples), int(self.processor.hop_length)
        made = self.processor([samples], **given, padding=True, truncation=False, pad_to_multiple_of=size)
        features: Tensor = torch.as_tensor(made["input_features"])[0].unflatten(1, (-1, size // hop))
        return features.transpose(0, 1).contiguous()


_GEMMA4_SAMPLES = 480_000
"""Samples that Gemma 4's feature extractor keeps of a clip."""


class MarkedAudioTokens(AudioTokens):
    """Audio tokens of Gemma 4, between two marks that its processor writes."""

    _made_mask, _mask_dtype = "input_features_mask", torch.bool

    def __init__(self, context: MediaContext, arguments: DataArguments) -> None:
        super().__init__(context, arguments)
        assert self._tower.marks is not None, "the processor writes marks"
        first, last = config_ids(context.config, *self._tower.marks)
        self.enclosing = [first], [last]

    @property
    def _max_seconds(self) -> float | None:
        has_spectra = hasattr(self.processor, "hop_length")
        return _GEMMA4_SAMPLES / float(self.processor.sampling_rate) if has_spectra else None

    def _frames(self, samples: int) -> int:
        own = self.processor
        if not hasattr(own, "hop_length"):
            return -(-samples // int(own.audio_samples_per_token))
        # half a window is padded before the first sample, and a frame needs one sample behind its window
        return max(int(samples + own.frame_length // 2 - own.frame_length - 1) // int(own.hop_length) + 1, 0)


def audio_tokens(
    config: McaModelConfig,
    directories: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
) -> AudioTokens:
    """Return the audio tokens of a model, whose feature extractor is in one of ``directories``.

    Raises:
        UsageError: The model does not support audio, a package is missing, or there is no feature extractor.
    """
    part = get_family(config.model_type).vision if config.vision_fields is not None else None
    if part is None or part.audio is None:
        raise UsageError(f"a {config.model_type} model does not support audio; remove it from the rows")
    token = require_placeholder(AUDIO, config, config.vision_fields)
    require_audio_packages()
    kind = AudioTokens if part.audio.marks is None else MarkedAudioTokens
    return kind(MediaContext(load_processor(directories, AUDIO), token, config, tokenizer), arguments)
