"""Which parts of a vision-language model an adapter leaves out, as ``exclude_modules`` says it.

What else a configuration says is read in `config`.
"""

import re
from collections.abc import Collection, Iterable

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import family_of


def exclude_parts(document: JsonObject, config: McaModelConfig, adapted: Collection[str]) -> None:
    """Excludes the parts that are not adapted; they share names of modules, so PEFT would adapt them too.

    Args:
        document: Of ``adapter_config.json``; it is changed.
        config: Of the model; one of text alone has no parts.
        adapted: Of ``language``, ``vision`` and ``projector``.
    """
    family = family_of(config.model_type)
    if family.vision is None:
        return
    spelling = family.vision.spelling(family.as_modules(config))
    sees = _beginning_with(spelling.vision.values())
    joins = _beginning_with(map(spelling.of_vision, family.vision.projector))
    parts = {
        "language": f"(?!{sees}).*",
        "vision": f"(?!{joins}){sees}.*",
        "projector": f"{joins}.*",
    }
    given = document.get("exclude_modules") or []
    own = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in given]
    left = [pattern for part, pattern in parts.items() if part not in adapted]
    document["exclude_modules"] = "|".join([*own, *left]) or None


def _beginning_with(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"
