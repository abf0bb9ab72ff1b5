"""Audio clips that a plan assumes per sequence, the activation memory of the audio tower, and all media together.

The lines are taken from dry runs, as those of `vision_memory`.
"""

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.parts.layer_costs import SavedTensor
from mca_models.templates.parts.vision_tower import AudioTower
from mca_train.plan.sizes import Sizes
from mca_train.plan.vision_memory import Images

if TYPE_CHECKING:
    from mca_models.templates.parts.vision_language import Part

SECONDS = 30.0
"""Default length of a clip in a plan."""
_BANDS = 128
"""Bands of the spectrogram of Gemma 4, which its configuration does not name."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Facts of an encoder.

    Args:
        attention: Elements that a layer's attention saves per position, in multiples of the hidden size.
        strided: The convolutions are over time and frequency, and an encoder's position is a token.
        window: All clips have the frames of the longest.
        windows: Longer clips are several windows.
        rate: Frames per second.
        seconds: Longest clip; None: any length, or that of a window.
        frames_first: The input has frames before bands.
    """

    attention: int = 5
    strided: bool = False
    window: bool = False
    windows: bool = False
    rate: int = 100
    seconds: float | None = None
    frames_first: bool = False


_KINDS = {
    "qwen2_audio_encoder": _Kind(attention=8, window=True),
    "qwen2_5_omni_audio_encoder": _Kind(),
    "qwen3_omni_moe_audio_encoder": _Kind(strided=True),
    "qwen3_asr_encoder": _Kind(strided=True),
    "voxtral_encoder": _Kind(window=True, windows=True),
    "audioflamingo3_encoder": _Kind(attention=8, window=True, windows=True),
    "glmasr_encoder": _Kind(window=True, windows=True),
    "gemma4_audio": _Kind(attention=108, strided=True, seconds=30, frames_first=True),
    "gemma4_unified_audio": _Kind(strided=True, rate=25, frames_first=True),
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
        computed: Frames of each window that the tower computes.
        tokens: Tokens of each.
        mask: Input of the tower that marks the frames of a clip; empty: there is none.
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
    windows: int = 1
    """Windows of each."""
    halvings: tuple[int, ...] = ()
    """Channels of convolutions of Gemma 4, each of which halves frames and bands."""

    @property
    def frames_first(self) -> bool:
        """True if the input has frames before bands."""
        return _KINDS[self.kind].frames_first

    @property
    def positions(self) -> int:
        """Positions of the encoder for the clips of one sequence."""
        own = self.tokens if _KINDS[self.kind].strided else self.windows * self.computed // 2
        return self.count * own

    def flops(self, sequences: int) -> float:
        """Return the forward FLOPs of the layers for ``sequences``."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        return 2.0 * sequences * self.positions * self.depth * layer

    def __str__(self) -> str:
        trained = "trained" if "audio" in self.trained else "frozen"
        seconds = self.frames / _KINDS[self.kind].rate
        return (
            f"{self.count} of {seconds:g} seconds in each sequence, {self.tokens} tokens each, {trained} "
            "tower; --clips N, --clip_seconds S"
        )

    def document(self) -> JsonObject:
        """Return their part of the JSON object of a plan."""
        return {"in_each_sequence": self.count, "frames": self.frames, "tokens_of_each": self.tokens}

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
            found.append(
                SavedTensor("spectrograms", 1.0 * elements * self.count * self.windows * self._front, where)
            )
        return found

    @property
    def _front(self) -> int:
        """Elements that the convolutions save for one clip."""
        if not self.depth:
            return self.computed * self.bands
        if self.halvings:  # output, norm in fp32 and activation of each convolution
            sides = [self.bands // 4**step * channels for step, channels in enumerate(self.halvings, 1)]
            return int(self.computed * (self.bands + 4 * sum(sides)))
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
    clips = _clips(config, sizes, family.audio, 1 if count is None else count, seconds, trained)
    needed = clips.count * (clips.tokens + 1)
    if needed > room:
        if count is None and seconds is None:
            return None
        raise UsageError(
            f"--clips {clips.count}: they are {needed} tokens, and a sequence has {room} without images; use fewer or "
            "shorter clips (--clip_seconds), or a larger seq_length"
        )
    return clips if clips.count else None


def _clips(
    config: McaModelConfig,
    sizes: JsonObject,
    tower: AudioTower,
    count: int,
    seconds: float | None,
    trained: "frozenset[Part]",
) -> Clips:
    """Return ``count`` clips of ``seconds`` for a tower with these ``sizes``."""
    kind = _KINDS[sizes["model_type"]]
    most = 2 * (sizes.get("max_source_positions") or sizes.get("max_position_embeddings") or 1500)
    longest = most / kind.rate if kind.window and not kind.windows else kind.seconds
    if kind.windows and tower.windows is not None:
        longest = tower.windows * most / kind.rate
    if seconds is not None and longest is not None and seconds > longest:
        raise UsageError(
            f"--clip_seconds {seconds:g}: clips of {config.model_type} have at most {longest:g} seconds; set at "
            "most that"
        )
    frames = round(min(seconds or SECONDS, longest or math.inf) * kind.rate)
    full, rest = divmod(frames, most) if kind.windows else (0, frames)
    windows = full + (rest > 0)
    if tower.mask is None:  # all frames of a window count
        full, rest = windows, 0
    hidden = sizes.get("d_model") or sizes.get("hidden_size") or sizes["audio_embed_dim"]
    return Clips(
        kind=sizes["model_type"],
        depth=sizes.get("encoder_layers") or sizes.get("num_hidden_layers") or 0,
        hidden=hidden,
        inner=sizes.get("encoder_ffn_dim") or sizes.get("intermediate_size") or 4 * hidden,
        bands=sizes.get("num_mel_bins") or sizes.get("audio_embed_dim") or _BANDS,
        channels=sizes.get("downsample_hidden_size", 0),
        count=count,
        frames=frames,
        computed=most if kind.window else frames,
        tokens=full * tower.tokens(config, most) + (tower.tokens(config, rest) if rest else 0),
        mask=tower.mask or "",
        trained=trained,
        windows=windows,
        halvings=tuple(sizes.get("subsampling_conv_channels") or ()),
    )


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
    """Images, videos and audio clips of each sequence.

    Args:
        images: The images; None: there are none.
        videos: The frames of videos; None: there are none.
        clips: The clips; None: there are none.
    """

    images: Images | None = None
    videos: Images | None = None
    clips: Clips | None = None

    @property
    def _parts(self) -> "tuple[Images | Clips, ...]":
        return tuple(part for part in (self.images, self.videos, self.clips) if part is not None)

    @property
    def trained(self) -> "frozenset[Part]":
        """Trained parts of the model."""
        return self._parts[0].trained

    def flops(self, sequences: int) -> tuple[float, float]:
        """Return the forward FLOPs of the towers for ``sequences``, and those of trained towers."""
        found = [(part, part.flops(sequences)) for part in self._parts]
        trained = [
            flops
            for part, flops in found
            if ("audio" if isinstance(part, Clips) else "vision") in self.trained
        ]
        return sum(flops for _, flops in found), sum(trained)

    def lines(self, sizes: Sizes) -> list[SavedTensor]:
        """Return the tensors that a micro-batch's media save for the backward pass."""
        return [line for part in self._parts for line in part.lines(sizes)]

    def running(self, sizes: Sizes) -> float:
        """Return the peak bytes of the towers' forward passes if they save nothing."""
        vision = sum(part.running(sizes) for part in (self.images, self.videos) if part is not None)
        audio = 0.0 if self.clips is None else self.clips.running(sizes)
        return max(vision, audio)  # images and frames are computed together
