"""Gemma 4: HF ``Gemma4ForConditionalGeneration``: a tower that pools patches, an audio tower (E2B, E4B), and text."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.gemma4_images import CLIP_MARKS, GEMMA4_TOKENS, image_reach
from mca_models.templates.parts.gemma4_towers import gemma4_audio_tower, gemma4_vision_tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    AudioTower,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    module_spelling,
)
from mca_models.templates.parts.vision_values import audio_values, vision_values

AUDIO = ("audio_tower.", "embed_audio.")
_PROJECTOR = "embed_vision."
_PROJECTION = "embedding_projection"


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the towers and their projectors."""
    _, vision = vision_values(config)
    found = {
        **{TOWER + name: shape for name, shape in gemma4_vision_tower(vision).items()},
        **linear(_PROJECTOR + _PROJECTION, config.hidden_size, vision.size("hidden_size", 768), bias=False),
    }
    if (audio := audio_values(config)) is not None:
        tower, projector = AUDIO
        found |= {tower + name: shape for name, shape in gemma4_audio_tower(audio).items()}
        width = audio.size("output_proj_dims", 1536)
        found |= linear(projector + _PROJECTION, config.hidden_size, width, bias=False)
    return found


FAMILY = vision_language_family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    {"gemma4_text": get_family("gemma4_text")},
    VisionModel(
        tensors=tensors,
        spellings=(module_spelling(TOWER, _PROJECTOR, *AUDIO),),
        projector=(_PROJECTOR, AUDIO[1]),
        image_tokens="pooled",
        video_tokens="minutes",
        reach=image_reach,
        windowed=True,
        audio=AudioTower(
            names=AUDIO,
            mask="input_features_mask",
            tokens=lambda config, frames: -(-frames // 4),
            marks=CLIP_MARKS,
        ),
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults=GEMMA4_TOKENS),
)
