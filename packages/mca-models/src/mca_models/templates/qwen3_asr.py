"""Qwen3-ASR: HF ``Qwen3ASRForConditionalGeneration``, the encoder of Qwen 3 Omni and a Qwen 3 text model."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.omni_audio import STRIDED, strided_layers
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    PROJECTOR,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    module_spelling,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

_SIZES = {"d_model": 1024, "encoder_ffn_dim": 4096, "encoder_layers": 24}
"""Values of keys that ``audio_config`` leaves out, other than those of Qwen 3 Omni."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, given = vision_values(config, "audio_config")
    audio = VisionValues({**_SIZES, **given.values}, given.inside)
    width = audio.size("d_model", 1024)
    return {
        **{AUDIO_TOWER + name: shape for name, shape in strided_layers(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, width),
        **linear(f"{PROJECTOR}linear_2", audio.size("output_dim", 3584), width),
    }


FAMILY = vision_language_family(
    "qwen3_asr",
    "Qwen3ASRForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=tensors,
        spellings=(module_spelling(AUDIO_TOWER, PROJECTOR),),
        projector=(PROJECTOR,),
        image_tokens=None,
        audio=replace(STRIDED, mask="input_features_mask"),
    ),
    NestedTextConfig(
        text_model_type="", tied=True, towers=("audio_config",), defaults={"audio_token_id": 151676}
    ),
    assumed=True,
)
