"""Parts of a model that can be trained or frozen separately. It imports no torch."""

from typing import Literal, get_args

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import PREFIX
from mca_models.weights import Param, Stage

Part = Literal["language", "vision", "audio", "projector"]
"""Parts that can be trained or frozen: the text model, the vision tower, the audio tower, and the projectors."""
PARTS: tuple[Part, ...] = get_args(Part)
TEXT: tuple[Part, ...] = ("language",)
"""Parts that adapters target by default."""


def model_part(param: Param, config: McaModelConfig) -> str:
    """Return the `Part` of a parameter; ``unused`` if the model does not use it."""
    if param.stage is not Stage.VISION:
        return "language"
    vision = get_family(config.model_type).vision
    return "unused" if vision is None else vision.component(param.mca.removeprefix(PREFIX), config)


def model_parts(config: McaModelConfig) -> tuple[Part, ...]:
    """Return the parts of a model."""
    vision = None if config.vision is None else get_family(config.model_type).vision
    found = {"language"} if vision is None else {"language", *vision.parts(config)}
    return tuple(part for part in PARTS if part in found)
