"""LLaVA-OneVision: HF ``LlavaOnevisionForConditionalGeneration``: SigLIP and Qwen 2; only a lone image is tiled."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import unused_states
from mca_models.templates.parts.llava import (
    NEWLINE,
    ONEVISION_GRIDS,
    TILED_SPELLINGS,
    tiled_tensors,
    tiled_tokens,
    tokens_per_frame,
    tokens_per_tile,
    tokens_together,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, NestedTextConfig, VisionModel

FAMILY = vision_language_family(
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
        text_model_type="",
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
