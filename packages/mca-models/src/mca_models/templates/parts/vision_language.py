"""Families with a vision model, made of the families of their text part, and their parts that can be trained.

The vision models themselves are in the families' own files.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.config_table import TextFamilyTable
from mca_models.templates.family import Family
from mca_models.templates.parts.vision_tower import PREFIX, NestedTextConfig, VisionModel
from mca_models.weights import Param, Stage


def vision_language_family(
    model_type: str,
    architecture: str,
    texts: Mapping[str, Family],
    vision: VisionModel,
    inside: NestedTextConfig,
    *,
    assumed: bool = False,
) -> Family:
    """Return a family with a text part and a vision tower.

    Args:
        model_type: HF's name of the family.
        architecture: The HF class.
        texts: The families of its text part, by HF's ``model_type`` of that part.
        vision: Its vision model.
        inside: How its ``config.json`` holds that of the text part.
        assumed: A text part without a type is of the first family, as it is where there is but one.
    """
    tables = {
        kind: replace(text.table, composite=replace(inside, text_model_type=kind))
        for kind, text in texts.items()
    }

    def params(config: McaModelConfig) -> list[Param]:
        text = texts[config.text_model_type or ""].params(config)
        name = vision.spelling(config).text_to_file
        spelled = [replace(param, hf=tuple(map(name, param.hf))) for param in text]
        return [*vision.params(config), *spelled]

    def ignored(config: McaModelConfig) -> frozenset[str]:
        known = texts[config.text_model_type or ""].ignored_hf(config)
        return frozenset(map(vision.spelling(config).text_to_file, known))

    return Family(
        model_type=model_type,
        architecture=architecture,
        config=TextFamilyTable(tables, assumed or len(tables) == 1),
        params=params,
        ignored_hf=ignored,
        texts=texts,
        vision=vision,
    )


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
