"""LLaVA 1.5: HF ``LlavaForConditionalGeneration``: a CLIP or SigLIP tower before its last layers, and a text model."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, unused_states
from mca_models.templates.parts.llava import (
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    is_clip,
    llava_tensors,
    tokens_per_tile,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, NestedTextConfig, VisionModel
from mca_models.templates.parts.vision_values import vision_values


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the patches of an image, with ``default`` without the tower's first, the class token of CLIP."""
    about, vision = vision_values(config)
    first = about.choice("vision_feature_select_strategy", "default", "full") == "full"
    return tokens_per_tile(config) + is_clip(vision) - (not first)


FAMILY = vision_language_family(
    "llava",
    "LlavaForConditionalGeneration",
    {
        "llama": get_family("llama").with_defaults(LLAMA_DEFAULTS),
        "mistral": get_family("mistral").with_defaults(MISTRAL_DEFAULTS),
        "qwen2": get_family("qwen2"),
        "qwen3": get_family("qwen3"),
    },
    VisionModel(
        tensors=llava_tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-2),
        image_tokens="plain",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(text_model_type="", text_ties="too"),
    assumed=True,
)
