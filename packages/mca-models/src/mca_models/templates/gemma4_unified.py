"""Gemma 4 12B: HF ``Gemma4UnifiedForConditionalGeneration``: projected patches and waveforms, and the text model."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.gemma4_images import CLIP_MARKS, GEMMA4_TOKENS, image_reach
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AudioTower,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import audio_values, vision_values

_VISION, _AUDIO = "embed_vision.", "embed_audio."
_PROJECTOR = f"{_VISION}multimodal_embedder."
_PROJECTION = "embedding_projection"
PUBLISHED = Spelling(
    "model.language_model.",
    "lm_head.",
    {_PROJECTOR: f"model.{_VISION}", _VISION: "model.vision_embedder.", _AUDIO: f"model.{_AUDIO}"},
)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the projectors."""
    _, vision = vision_values(config)
    width = vision.size("mm_embed_dim", 3840)
    pixels = 3 * (vision.size("patch_size", 16) * vision.size("pooling_kernel_size", 3)) ** 2
    found = {
        **norm(f"{_VISION}patch_ln1", pixels),
        **linear(f"{_VISION}patch_dense", width, pixels),
        **norm(f"{_VISION}patch_ln2", width),
        f"{_VISION}pos_embedding": (vision.size("mm_posemb_size", 1120), 2, width),
        **norm(f"{_VISION}pos_norm", width),
        **linear(
            _PROJECTOR + _PROJECTION, config.hidden_size, vision.size("output_proj_dims", 3840), bias=False
        ),
    }
    if (audio := audio_values(config)) is not None:
        found |= linear(
            _AUDIO + _PROJECTION, config.hidden_size, audio.size("audio_embed_dim", 640), bias=False
        )
    return found


FAMILY = vision_language_family(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    {"gemma4_unified_text": get_family("gemma4_unified_text")},
    VisionModel(
        tensors=tensors,
        spellings=(PUBLISHED, module_spelling(_VISION, _AUDIO)),
        projector=(_PROJECTOR, _AUDIO),
        image_tokens="pooled",
        video_tokens="minutes",
        reach=image_reach,
        audio=AudioTower(
            names=(_AUDIO,),
            mask="input_features_mask",
            tokens=lambda config, frames: frames,
            marks=CLIP_MARKS,
        ),
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults=GEMMA4_TOKENS),
)
