"""Audio clips that a plan assumes per sequence, the activation memory of the audio tower, and all media together.

The lines are taken from dry runs, as those of `vision_memory`.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.parts.layer_costs import SavedTensor
from mca_train.plan.sizes import Sizes
from mca_train.plan.vision_memory import Images

if TYPE_CHECKING:
    from mca_models.megatron.features.vision_tower import Part

SECONDS = 30.0
"""Default length of a clip in a plan."""
_FRAMES = 100
"""Frames of a spectrogram per second, of all towers here."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Facts of an encoder.

    Args:
        attention: Elements that a layer's attention saves per position, in multiples of the hidden size.
        strided: The convolutions are over time and frequency, and an encoder's position is a token.
        window: All clips have the frames of the longest.
    """

    attention: int = 5
    strided: bool = False
    window: bool = False


_KINDS = {
    "qwen2_audio_encoder": _Kind(attention=8, window=True),
    "qwen2_5_omni_audio_encoder": _Kind(),
    "qwen3_omni_moe_audio_encoder": _Kind(strided=True),
    "qwen3_asr_encoder": _Kind(strided=True),
}


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Audio clips of one length in each sequence.

    Args:
        kind: Kind of the tower.
        depth: Layers of the encoder.
        hidden: Hidden size.
        inner: MLP size.
        bands: Bands of the spectrogram.
        channels: Channels of strided convolutions.
        count: Clips per sequence.
        frames: Frames of each clip.
        computed: Frames of each that the tower computes.
        tokens: Tokens of each.
        mask: Input of the tower that marks the frames of a clip.
        trained: Trained parts of the model.
    """

    kind: str
    depth: int
    hidden: int
    inner: int
    bands: int
    channels: int
    count: int
    frames: int
    computed: int
    tokens: int
    mask: str
    trained: "frozenset[Part]"

    @property
    def positions(self) -> int:
        """Positions of the encoder for the clips of one sequence."""
        return self.count * (self.tokens if _KINDS[self.kind].strided else self.computed // 2)

    def flops(self, sequences: int) -> float:
        """Return the forward FLOPs of the layers for ``sequences``."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        return 2.0 * sequences * self.positions * self.depth * layer

    def __str__(self) -> str:
        trained = "trained" if "audio" in self.trained else "frozen"
        return (
            f"{self.count} of {self.frames / _FRAMES:g} seconds in each sequence, {self.tokens} tokens each, {trained} "
            "tower; --clips N, --clip_seconds S"
        )

    def lines(self, sizes: Sizes) -> list[SavedTensor]:
        """Return the tensors that a micro-batch's clips save for the backward pass."""
        if not self.trained & {"audio", "projector"}:
            return []
        where, elements = f"transformers: {self.kind}", sizes.sequences * sizes.width
        found = [SavedTensor("audio projector", 2.0 * elements * self.positions * self.hidden, where)]
        if "audio" in self.trained:
            layer = (_KINDS[self.kind].attention + 4) * self.hidden + 2 * self.inner
            found.append(
                SavedTensor("audio tower", 1.0 * elements * self.positions * self.depth * layer, where)
            )
            found.append(SavedTensor("spectrograms", 1.0 * elements * self.count * self._front, where))
        return found

    @property
    def _front(self) -> int:
        """Elements that the convolutions save for one clip."""
        if not _KINDS[self.kind].strided:
            return self.computed * (self.bands + 3 * self.hidden)
        halved = sum(self.bands // 2**step * self.channels * 2 // 2**step for step in (1, 2, 3))
        return self.computed * (self.bands + halved + self.channels * self.bands // 64)

    def running(self, sizes: Sizes) -> float:
        """Return the peak bytes of the tower's forward pass if it saves nothing."""
        return float(sizes.sequences * self.positions * sizes.width * (2 * self.inner + 2 * self.hidden))


def plan_clips(
    config: McaModelConfig,
    trained: "frozenset[Part]",
    room: int,
    *,
    takes: bool,
    count: int | None = None,
    seconds: float | None = None,
) -> Clips | None:
    """Return the audio clips of each sequence in a plan.

    Args:
        config: Model configuration.
        trained: Parts of the model.
        room: Tokens of a sequence without images.
        takes: The task supports media.
        count: Requested number; None: one, if the model and the task support audio and it fits.
        seconds: Requested length; None: `SECONDS`.

    Raises:
        UsageError: The requested clips are not possible.
    """
    family = get_family(config.model_type).vision
    sizes = _sizes(config) if takes else None
    if sizes is None or family is None or family.audio is None:
        if count or seconds:
            raise UsageError(
                f"--clips: a {config.model_type} model has no audio tower that a plan knows, or this kind of run "
                "supports no audio; remove --clips"
            )
        return None
    kind, frames = _KINDS[sizes["model_type"]], round((seconds or SECONDS) * _FRAMES)
    most = 2 * sizes.get("max_source_positions", 1500)
    if kind.window and frames > most:
        raise UsageError(
            f"--clip_seconds {seconds:g}: {config.model_type} hears {most / _FRAMES:g} seconds"
            "; set at most that"
        )
    clips = Clips(
        kind=sizes["model_type"],
        depth=sizes["encoder_layers"],
        hidden=sizes["d_model"],
        inner=sizes["encoder_ffn_dim"],
        bands=sizes["num_mel_bins"],
        channels=sizes.get("downsample_hidden_size", 0),
        count=1 if count is None else count,
        frames=frames,
        computed=most if kind.window else frames,
        tokens=family.audio.tokens(config, frames),
        mask=family.audio.mask or "",
        trained=trained,
    )
    needed = clips.count * (clips.tokens + 1)
    if needed > room:
        if count is None and seconds is None:
            return None
        raise UsageError(
            f"--clips {clips.count}: they are {needed} tokens, and a sequence has {room} without images; use fewer or "
            "shorter clips (--clip_seconds), or a larger seq_length"
        )
    return clips if clips.count else None


def _sizes(config: McaModelConfig) -> JsonObject | None:
    """Return the audio tower's configuration with its defaults; None: there is none, or an unknown one."""
    audio = (config.vision_fields or {}).get("audio_config")
    if audio is None:
        return None
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[config.model_type](audio_config=copy.deepcopy(dict(audio)))
    found: JsonObject = whole.audio_config.to_dict()
    return found if found["model_type"] in _KINDS else None


@dataclass(frozen=True, kw_only=True)
class PlannedMedia:
    """Images and audio clips of each sequence.

    Args:
        images: The images; None: there are none.
        clips: The clips; None: there are none.
    """

    images: Images | None = None
    clips: Clips | None = None

    @property
    def _parts(self) -> "tuple[Images | Clips, ...]":
        return tuple(part for part in (self.images, self.clips) if part is not None)

    @property
    def trained(self) -> "frozenset[Part]":
        """Trained parts of the model."""
        return self._parts[0].trained

    def flops(self, sequences: int) -> tuple[float, float]:
        """Return the forward FLOPs of the towers for ``sequences``, and those of trained towers."""
        found = {part: part.flops(sequences) for part in self._parts}
        trained = [
            flops
            for part, flops in found.items()
            if ("audio" if isinstance(part, Clips) else "vision") in self.trained
        ]
        return sum(found.values()), sum(trained)

    def lines(self, sizes: Sizes) -> list[SavedTensor]:
        """Return the tensors that a micro-batch's media save for the backward pass."""
        return [line for part in self._parts for line in part.lines(sizes)]

    def running(self, sizes: Sizes) -> float:
        """Return the peak bytes of the towers' forward passes if they save nothing."""
        return max(part.running(sizes) for part in self._parts)
