"""Audio Flamingo 3: HF ``AudioFlamingo3ForConditionalGeneration``: a Whisper encoder with averaged pairs, Qwen 2."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import AUDIO_TOWER, PROJECTOR, NestedTextConfig, Shapes, linear
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.parts.whisper_tower import audio_model, whisper_tower, whisper_values


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, audio = vision_values(config, "audio_config")[0], whisper_values(config)
    width, biased = config.hidden_size, about.flag("projector_bias", True)
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, audio.size("d_model", 1280), bias=biased),
        **linear(f"{PROJECTOR}linear_2", width, width, bias=biased),
    }


FAMILY = vision_language_family(
    "audioflamingo3",
    "AudioFlamingo3ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    audio_model(tensors, lambda config, frames: -(-frames // 2) // 2, mask="input_features_mask", windows=20),
    NestedTextConfig(
        text_model_type="", text_ties="nothing", towers=("audio_config",), defaults={"audio_token_id": 151669}
    ),
    assumed=True,
)
