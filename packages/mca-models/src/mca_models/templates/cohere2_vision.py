"""Command A Vision: HF ``Cohere2VisionForConditionalGeneration``: a SigLIP tower and a Cohere 2 text model."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, shuffled_tokens
from mca_models.templates.parts.cohere_vision import cohere_tensors, without_logit_scale
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, TOWER, NestedTextConfig, VisionModel

FAMILY = vision_language_family(
    "cohere2_vision",
    "Cohere2VisionForConditionalGeneration",
    {"cohere2": without_logit_scale(get_family("cohere2"))},
    VisionModel(
        tensors=partial(cohere_tensors, default=36864),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="tile_breaks",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 255036}),
)
