"""LLaVA 1.5, NeXT and OneVision, and ViP-LLaVA: inner layers of a tower, and a text model."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import by_type
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, clip_tower, unused_states
from mca_models.templates.parts.llava import (
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    NEWLINE,
    ONEVISION_GRIDS,
    TILED_SPELLINGS,
    is_clip,
    llava_tensors,
    tiled_tensors,
    tiled_tokens,
    tokens_per_frame,
    tokens_per_tile,
    tokens_together,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    norm,
)
from mca_models.templates.parts.vision_values import vision_values


# LLaVA 1.5: HF `LlavaForConditionalGeneration`: a CLIP or SigLIP tower before its last layers, and a text model.
def tokens_per_image(config: McaModelConfig) -> int:
    """Return the patches of an image, with ``default`` without the tower's first, the class token of CLIP."""
    about, vision = vision_values(config)
    first = about.choice("vision_feature_select_strategy", "default", "full") == "full"
    return tokens_per_tile(config) + is_clip(vision) - (not first)


LLAVA = vision_language_family(
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
    NestedTextConfig(text_ties="too"),
    assumed=True,
)


# LLaVA-NeXT (1.6): HF `LlavaNextForConditionalGeneration`: LLaVA on tiles of an image.
LLAVA_NEXT = vision_language_family(
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
    NestedTextConfig(defaults={"image_token_index": 32000}),
    assumed=True,
)


# LLaVA-OneVision: HF `LlavaOnevisionForConditionalGeneration`: SigLIP and Qwen 2; only a lone image is tiled.
LLAVA_ONEVISION = vision_language_family(
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=partial(tiled_tensors, clip=False),
        spellings=TILED_SPELLINGS,
        projector=(PROJECTOR, NEWLINE),
        unused=partial(unused_states, default=-1),
        image_tokens="joined_tiles",
        tokens_per_image=partial(tokens_per_tile, clip=False),
        tokens_of_size=partial(tiled_tokens, clip=False),
        tokens_together=tokens_together,
        video_tokens="pooled",
        tokens_per_frame=tokens_per_frame,
    ),
    NestedTextConfig(
        text_ties="too",
        defaults={
            **{
                "image_token_index": 151646,
                "video_token_index": 151647,
                "vision_aspect_ratio": "anyres_max_9",
            },
            "image_grid_pinpoints": ONEVISION_GRIDS,
        },
    ),
    assumed=True,
)


# ViP-LLaVA: HF `VipLlavaForConditionalGeneration`: LLaVA on the normed states of several layers of CLIP.
LAYERS = (-2, -5, -8, -11, 6)
"""Layers of the tower whose states the projector gets, where the file does not say."""


def _tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    taken = vision.size("hidden_size", 768) * len(about.index_or_more("vision_feature_layer", LAYERS))
    return {
        **{TOWER + name: shape for name, shape in clip_tower(vision).items()},
        **norm(f"{PROJECTOR}projector_layernorm", taken),
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size),
    }


VIPLLAVA = vision_language_family(
    "vipllava",
    "VipLlavaForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(LLAMA_DEFAULTS)},
    VisionModel(
        tensors=_tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=LAYERS),
        image_tokens="plain",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(defaults={"image_token_index": 32000}),
    assumed=True,
)

FAMILIES = by_type(LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, VIPLLAVA)
