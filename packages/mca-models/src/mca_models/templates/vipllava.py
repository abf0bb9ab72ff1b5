"""ViP-LLaVA: HF ``VipLlavaForConditionalGeneration``: LLaVA on the normed states of several layers of CLIP."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, clip_tower, unused_states
from mca_models.templates.parts.llava import LLAMA_DEFAULTS, tokens_per_tile
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

LAYERS = (-2, -5, -8, -11, 6)
"""Layers of the tower whose states the projector gets, where the file does not say."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    taken = vision.size("hidden_size", 768) * len(about.index_or_more("vision_feature_layer", LAYERS))
    return {
        **{TOWER + name: shape for name, shape in clip_tower(vision).items()},
        **norm(f"{PROJECTOR}projector_layernorm", taken),
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size),
    }


FAMILY = vision_language_family(
    "vipllava",
    "VipLlavaForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(LLAMA_DEFAULTS)},
    VisionModel(
        tensors=tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=LAYERS),
        image_tokens="plain",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(text_model_type="", defaults={"image_token_index": 32000}),
    assumed=True,
)
