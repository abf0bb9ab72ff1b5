"""LightOnOCR: HF ``LightOnOcrForConditionalGeneration``: a Pixtral tower and Qwen 3."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.pixtral_tower import pixtral_tensors, tokens_of_size
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig, VisionModel, module_spelling

_TOWER, _PROJECTOR = "vision_encoder.", "vision_projection."

FAMILY = vision_language_family(
    "lighton_ocr",
    "LightOnOcrForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=partial(pixtral_tensors, tower=_TOWER, projector=_PROJECTOR),
        spellings=(module_spelling(_TOWER, _PROJECTOR),),
        projector=(_PROJECTOR,),
        image_tokens="whole_lines",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 151655}),
)
