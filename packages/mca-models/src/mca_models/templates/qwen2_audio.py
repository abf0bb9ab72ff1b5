"""Qwen2-Audio: HF ``Qwen2AudioForConditionalGeneration``, a Whisper encoder and a Qwen 2 text model."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import AUDIO_TOWER, PROJECTOR, NestedTextConfig, Shapes, linear
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.parts.whisper_tower import audio_model, whisper_tower

_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768},
}
"""Keys that published files leave out."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, audio = vision_values(config, "audio_config")
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear", config.hidden_size, audio.size("d_model", 1280)),
    }


FAMILY = vision_language_family(
    "qwen2_audio",
    "Qwen2AudioForConditionalGeneration",
    {"qwen2": get_family("qwen2").with_defaults(_DEFAULTS)},
    audio_model(
        tensors, lambda config, frames: ((frames - 1) // 2 - 1) // 2 + 1, mask="feature_attention_mask"
    ),
    NestedTextConfig(
        text_model_type="",
        text_ties="nothing",
        towers=("audio_config",),
        defaults={"audio_token_index": 151646},
    ),
    assumed=True,
)
