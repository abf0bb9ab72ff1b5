"""Audio encoders of Qwen's omni models, with the number of features of a clip.

Both compute chunks of a clip apart in their convolutions. Names are those of transformers' modules below the tower.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.vision_tower import AUDIO_TOWER, AudioTower, Shapes, linear, norm
from mca_models.templates.parts.vision_values import VisionValues, vision_values
from mca_models.templates.parts.whisper_tower import convolution, encoder_layers

_MASK = "feature_attention_mask"


def pooled_encoder(audio: VisionValues) -> Shapes:
    """Return the tensors of Qwen 2.5 Omni's encoder, which averages pairs of Whisper's features."""
    width, given = audio.size("d_model", 1280), audio.size("output_dim", 3584)
    return {
        **convolution("conv1", width, audio.size("num_mel_bins", 128)),
        **convolution("conv2", width, width),
        "audio_bos_eos_token.weight": (2, given),
        **encoder_layers(audio),
        **norm("ln_post", width),
        **linear("proj", given, width),
    }


POOLED = AudioTower(
    names=(AUDIO_TOWER,), mask=_MASK, tokens=lambda config, frames: ((frames - 1) // 2 - 1) // 2 + 1
)


def strided_encoder(audio: VisionValues) -> Shapes:
    """Return the tensors of Qwen 3 Omni's encoder: strided layers and the projector of its features."""
    width = audio.size("d_model", 1280)
    return {
        **strided_layers(audio),
        **linear("proj1", width, width),
        **linear("proj2", audio.size("output_dim", 3584), width),
    }


def strided_layers(audio: VisionValues) -> Shapes:
    """Return the tensors of an encoder with convolutions over time and frequency."""
    width, inner = audio.size("d_model", 1280), audio.size("downsample_hidden_size", 480)
    return {
        **convolution("conv2d1", inner, 1, 3, 3),
        **convolution("conv2d2", inner, inner, 3, 3),
        **convolution("conv2d3", inner, inner, 3, 3),
        **linear("conv_out", width, inner * -(-audio.size("num_mel_bins", 128) // 8), bias=False),
        **encoder_layers(audio, biased_keys=True),
        **norm("ln_post", width),
    }


def _chunk(config: McaModelConfig) -> int:
    """Return the frames that convolutions get together."""
    return 2 * vision_values(config, "audio_config")[1].size("n_window", 50)


def _strided_tokens(config: McaModelConfig, frames: int) -> int:
    """Return 13 tokens for each full chunk, a number that transformers fixes, and those of the rest."""
    full, rest = divmod(frames, _chunk(config))
    return full * 13 + -(-rest // 8)


STRIDED = AudioTower(names=(AUDIO_TOWER,), mask=_MASK, tokens=_strided_tokens, chunk=_chunk, unpadded=True)
