"""Tensors of Whisper's encoder: two convolutions over time, a table of positions, and encoder layers.

Names are those of transformers' modules below the tower.
"""

from collections.abc import Callable

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    PROJECTOR,
    AudioTower,
    Shapes,
    VisionModel,
    linear,
    llava_spelling,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""Keys of later families, with those of Whisper."""


def whisper_values(config: McaModelConfig) -> VisionValues:
    """Return the values of ``audio_config`` under Whisper's keys."""
    _, audio = vision_values(config, "audio_config")
    return VisionValues({_KEYS.get(key, key): value for key, value in audio.values.items()}, audio.inside)


def whisper_tower(audio: VisionValues) -> Shapes:
    """Return the tensors of a tower with ``audio_config``."""
    width, mels = audio.size("d_model", 1280), audio.size("num_mel_bins", 128)
    return {
        **convolution("conv1", width, mels),
        **convolution("conv2", width, width),
        "embed_positions.weight": (audio.size("max_source_positions", 1500), width),
        **encoder_layers(audio),
        **norm("layer_norm", width),
    }


def encoder_layers(audio: VisionValues, *, biased_keys: bool = False) -> Shapes:
    """Return the encoder layers; Whisper's keys have no bias."""
    width, inner = audio.size("d_model", 1280), audio.size("encoder_ffn_dim", 5120)
    layer = {
        **norm("self_attn_layer_norm", width),
        **norm("final_layer_norm", width),
        **linear("fc1", inner, width),
        **linear("fc2", width, inner),
    }
    for x in ("q", "k", "v", "out"):
        layer |= linear(f"self_attn.{x}_proj", width, width, bias=biased_keys or x != "k")
    return repeat_shapes("layers", audio.layers("encoder_layers", 32), layer)


def audio_model(
    tensors: Callable[[McaModelConfig], Shapes],
    tokens: Callable[[McaModelConfig, int], int],
    *,
    mask: str | None,
    windows: int | None = 1,
    positions: bool = True,
) -> VisionModel:
    """Return the tower and projector of a model that takes audio alone.

    Args:
        tensors: Every tensor of tower and projector.
        tokens: As of `AudioTower`, like ``mask`` and ``windows``.
        mask: Input that marks the frames of a clip.
        windows: Most windows of a clip.
        positions: The tower has Whisper's table of positions, which transformers never trains.
    """
    return VisionModel(
        tensors=tensors,
        spellings=(llava_spelling(AUDIO_TOWER, PROJECTOR), module_spelling(AUDIO_TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        unused=lambda config: (f"{AUDIO_TOWER}embed_positions.",) if positions else (),
        image_tokens=None,
        audio=AudioTower(names=(AUDIO_TOWER,), mask=mask, tokens=tokens, windows=windows),
    )


def convolution(name: str, width: int, inputs: int, *kernel: int) -> Shapes:
    """Return the tensors of a convolution, over three frames without a ``kernel``."""
    return {f"{name}.weight": (width, inputs, *(kernel or (3,))), f"{name}.bias": (width,)}
