"""InternVL 3 in HF's own format: HF ``InternVLForConditionalGeneration``, over text models of several families."""

from mca_models.templates import get_family
from mca_models.templates.parts.intern_vit import intern_vit, tokens_per_tile
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    VisionModel,
    llava_spelling,
    module_spelling,
)

TEXTS = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss")

FAMILY = vision_language_family(
    "internvl",
    "InternVLForConditionalGeneration",
    {text: get_family(text) for text in TEXTS},
    VisionModel(
        tensors=lambda config: intern_vit(config, "encoder.layer"),
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="tiles",
        video_tokens="numbered",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(text_model_type="", tied=True),
)
