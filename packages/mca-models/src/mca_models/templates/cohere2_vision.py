"""Command A Vision and Aya Vision: HF ``Cohere2VisionForConditionalGeneration``, ``AyaVisionForConditionalGeneration``.

A SigLIP tower, a gated MLP on merged patches, and a Cohere 2 text model.
"""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, shuffled_tokens, siglip_tower, unused_states
from mca_models.templates.parts.multipliers import LOGIT_SCALE
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


def text_family() -> Family:
    """Return Cohere 2 without the scale of its logits, which transformers' classes with images do not apply."""
    text = get_family("cohere2")
    facts = tuple(fact for fact in text.table.facts if fact is not LOGIT_SCALE)
    return replace(text, config=replace(text.table, facts=facts))


def tensors(config: McaModelConfig, default: int | None = None, *, normed: bool = False) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: Model configuration.
        default: ``alignment_intermediate_size`` that files leave out; None: the hidden size.
        normed: A LayerNorm is in front of the projector.
    """
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("alignment_intermediate_size", default or config.hidden_size)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **(norm(f"{PROJECTOR}layernorm", merged) if normed else {}),
        **linear(f"{PROJECTOR}linear_1", between, merged),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between // 2),
    }


FAMILY = vision_language_family(
    "cohere2_vision",
    "Cohere2VisionForConditionalGeneration",
    {"cohere2": text_family()},
    VisionModel(
        tensors=partial(tensors, default=36864),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="tile_breaks",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 255036}),
)

AYA_VISION = vision_language_family(
    "aya_vision",
    "AyaVisionForConditionalGeneration",
    {"cohere2": text_family()},
    VisionModel(
        tensors=partial(tensors, normed=True),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-1),
        image_tokens="named_tiles",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_index": 255036}),
)
