"""Aya Vision: HF ``AyaVisionForConditionalGeneration``: the states of a SigLIP tower and a Cohere 2 text model."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, shuffled_tokens, unused_states
from mca_models.templates.parts.cohere_vision import cohere_tensors, without_logit_scale
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, NestedTextConfig, VisionModel

FAMILY = vision_language_family(
    "aya_vision",
    "AyaVisionForConditionalGeneration",
    {"cohere2": without_logit_scale(get_family("cohere2"))},
    VisionModel(
        tensors=partial(cohere_tensors, normed=True),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-1),
        image_tokens="named_tiles",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_index": 255036}),
)
