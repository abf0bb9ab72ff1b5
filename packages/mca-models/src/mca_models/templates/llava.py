"""LLaVA 1.5: HF ``LlavaForConditionalGeneration``: a CLIP or SigLIP tower before its last layers, and a text model."""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, clip_tower, siglip_tower, unused_states
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
)
from mca_models.templates.parts.vision_values import vision_values

LLAMA = get_family("llama")
_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "max_position_embeddings": 2048},
}
"""Keys that published files leave out."""
TEXTS = (
    replace(LLAMA, config=replace(LLAMA.table, defaults={**LLAMA.table.defaults, **_DEFAULTS})),
    *map(get_family, ("mistral", "qwen2", "qwen3")),
)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    clip = vision.choice("model_type", "clip_vision_model", "siglip_vision_model") == "clip_vision_model"
    tower = clip_tower(vision) if clip else siglip_tower(vision)
    biased = about.flag("multimodal_projector_bias", True)
    taken = vision.size("hidden_size", 768) * len(about.index_or_more("vision_feature_layer", -2))
    return {
        **{TOWER + name: shape for name, shape in tower.items()},
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size, bias=biased),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the patches of an image, with ``default`` without the tower's first, the class token of CLIP."""
    about, vision = vision_values(config)
    clip = vision.choice("model_type", "clip_vision_model", "siglip_vision_model") == "clip_vision_model"
    side = vision.size("image_size", 224) // vision.size("patch_size", 32 if clip else 16)
    first = about.choice("vision_feature_select_strategy", "default", "full") == "full"
    return int(side**2 + clip - (not first))


FAMILY = vision_language_family(
    "llava",
    "LlavaForConditionalGeneration",
    {text.model_type: text for text in TEXTS},
    VisionModel(
        tensors=tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-2),
        image_tokens="plain",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(text_model_type="", text_ties="too"),
    assumed=True,
)
