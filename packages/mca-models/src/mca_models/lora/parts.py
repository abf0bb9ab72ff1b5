"""Which modules a new adapter leaves out, as ``exclude_modules`` says it.

What else a configuration says is read in `config`.
"""

import re
from collections.abc import Collection, Iterable

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.lora.config import ALL_LINEAR
from mca_models.templates import family_of


def exclude_unadapted(document: JsonObject, config: McaModelConfig, adapted: Collection[str]) -> None:
    """Excludes what PEFT would adapt too.

    These are parts of a vision-language model that share names of modules with others, and modules that
    ``all-linear`` means and that PEFT cannot adapt.

    Args:
        document: Of ``adapter_config.json``; it is changed.
        config: Of the model; one of text alone has no parts.
        adapted: Of ``language``, ``vision`` and ``projector``.
    """
    targets = document.get("target_modules")
    linear = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    left = [*_parts_left(config, adapted), *map(_named, _unadapted(config) if linear else ())]
    if left:
        given = document.get("exclude_modules") or []
        own = [given] if isinstance(given, str) else map(_named, given)
        document["exclude_modules"] = "|".join([*own, *left])


def _parts_left(config: McaModelConfig, adapted: Collection[str]) -> list[str]:
    family = family_of(config.model_type)
    if family.vision is None:
        return []
    spelling = family.vision.spelling(family.as_modules(config))
    sees = _beginning_with(spelling.vision.values())
    joins = _beginning_with(map(spelling.of_vision, family.vision.projector))
    parts = {
        "language": f"(?!{sees}).*",
        "vision": f"(?!{joins}){sees}.*",
        "projector": f"{joins}.*",
    }
    return [pattern for part, pattern in parts.items() if part not in adapted]


def _unadapted(config: McaModelConfig) -> list[str]:
    return sorted(family_of(config.model_type).unadapted)


def _named(name: str) -> str:
    return rf"(.*\.)?{re.escape(name)}"


def _beginning_with(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"
