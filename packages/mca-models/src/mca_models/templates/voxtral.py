"""Voxtral: HF ``VoxtralForConditionalGeneration``, a Whisper encoder and a Llama text model.

The projector joins states until they are as wide as the encoder's MLP.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import AUDIO_TOWER, PROJECTOR, NestedTextConfig, Shapes, linear
from mca_models.templates.parts.whisper_tower import audio_model, whisper_tower, whisper_values

_DEFAULTS = {
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_key_value_heads": 8},
    **{"vocab_size": 131072, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128},
    **{"num_attention_heads": 32, "rope_theta": 1e8},
}
"""Keys that files may leave out."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    audio, width = whisper_values(config), config.hidden_size
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, audio.size("encoder_ffn_dim", 5120), bias=False),
        **linear(f"{PROJECTOR}linear_2", width, width, bias=False),
    }


def tokens(config: McaModelConfig, frames: int) -> int:
    """Return the features of a window."""
    audio = whisper_values(config)
    return frames // 2 * audio.size("d_model", 1280) // audio.size("encoder_ffn_dim", 5120)


FAMILY = vision_language_family(
    "voxtral",
    "VoxtralForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(_DEFAULTS)},
    audio_model(tensors, tokens, mask=None, windows=None),
    NestedTextConfig(text_model_type="", text_ties="nothing", towers=("audio_config",)),
    assumed=True,
)
