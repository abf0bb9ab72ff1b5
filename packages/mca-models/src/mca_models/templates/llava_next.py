"""LLaVA-NeXT (1.6): HF ``LlavaNextForConditionalGeneration``: LLaVA on tiles of an image."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import unused_states
from mca_models.templates.parts.llava import (
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    NEWLINE,
    TILED_SPELLINGS,
    tiled_tensors,
    tiled_tokens,
    tokens_per_tile,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, NestedTextConfig, VisionModel

FAMILY = vision_language_family(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    {
        "llama": get_family("llama").with_defaults(LLAMA_DEFAULTS),
        "mistral": get_family("mistral").with_defaults(MISTRAL_DEFAULTS),
        "qwen2": get_family("qwen2"),
    },
    VisionModel(
        tensors=tiled_tensors,
        spellings=TILED_SPELLINGS,
        projector=(PROJECTOR, NEWLINE),
        unused=partial(unused_states, default=-2),
        image_tokens="joined_tiles",
        tokens_per_image=tokens_per_tile,
        tokens_of_size=tiled_tokens,
    ),
    NestedTextConfig(text_model_type="", defaults={"image_token_index": 32000}),
    assumed=True,
)
