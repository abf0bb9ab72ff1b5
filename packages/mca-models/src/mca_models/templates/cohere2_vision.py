"""Command A Vision: HF ``Cohere2VisionForConditionalGeneration``: a SigLIP tower and a Cohere 2 text model."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, shuffled_tokens, siglip_tower
from mca_models.templates.parts.multipliers import LOGIT_SCALE
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

COHERE2 = get_family("cohere2")
FACTS = tuple(fact for fact in COHERE2.table.facts if fact is not LOGIT_SCALE)
"""Transformers' class does not scale the logits."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("alignment_intermediate_size", 36864)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **linear(f"{PROJECTOR}linear_1", between, merged),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between // 2),
    }


FAMILY = vision_language_family(
    "cohere2_vision",
    "Cohere2VisionForConditionalGeneration",
    {"cohere2": replace(COHERE2, config=replace(COHERE2.table, facts=FACTS))},
    VisionModel(
        tensors=tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="tile_breaks",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 255036}),
)
