"""Mistral Small 3.1 to 4, Ministral 3: HF ``Mistral3ForConditionalGeneration``: a Pixtral tower and a text model."""

from functools import partial

from mca_models.templates import get_family
from mca_models.templates.parts.pixtral_tower import pixtral_tensors, tokens_of_size
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    VisionModel,
    llava_spelling,
    module_spelling,
)

MINISTRAL3 = get_family("ministral3")
MISTRAL = get_family("mistral")
MISTRAL4 = get_family("mistral4")

FAMILY = vision_language_family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    {"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4},
    VisionModel(
        tensors=partial(pixtral_tensors, tower=TOWER, projector=PROJECTOR),
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="lines",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(text_model_type="", tied=True),
    assumed=True,
)
