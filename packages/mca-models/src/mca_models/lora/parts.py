"""Which modules a new adapter leaves out, as ``exclude_modules`` says it.

What else a configuration says is read in `config`.
"""

import re
from collections.abc import Collection, Iterable

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.lora.config import ALL_LINEAR, AdapterConfig
from mca_models.lora.targets import Target, linear_targets
from mca_models.templates import family_of

_OF_EXPERTS = frozenset("gate gate_proj up_proj down_proj w1 w2 w3".split())
"""What PEFT takes for the stacked weights of routed experts, in all models of their types."""


def exclude_unadapted(document: JsonObject, config: McaModelConfig, adapted: Collection[str]) -> None:
    """Excludes what PEFT would adapt too.

    These are parts of a vision-language model that share names of modules with others, and modules that
    ``all-linear`` means and that PEFT cannot adapt.

    Args:
        document: Of ``adapter_config.json``; it is changed.
        config: Of the model; one of text alone has no parts.
        adapted: Of ``language``, ``vision`` and ``projector``.
    """
    unadapted = sorted(family_of(config.model_type).unadapted) if _means_all(document) else ()
    left = [*_parts_left(config, adapted), *map(_named, unadapted)]
    if left:
        given = document.get("exclude_modules") or []
        own = [given] if isinstance(given, str) else map(_named, given)
        document["exclude_modules"] = "|".join([*own, *left])


def name_linears(document: JsonObject, config: McaModelConfig) -> None:
    """Names what ``all-linear`` means in a model with experts, where PEFT takes it for something else.

    PEFT turns the names of linears that routed experts had in transformers 4 into those of their stacked weights. It
    would not read the factors of shared experts and of dense layers, whose linears have the same names. By the names
    of their weights it does.

    Args:
        document: Of ``adapter_config.json``, with what it excludes; it is changed.
        config: Of the model.
    """
    if not _means_all(document) or not config.num_moe_experts or document.get("lora_dropout"):
        return  # with dropout PEFT takes no parameters
    adapter = AdapterConfig.from_dict(document)
    meant = [each for each in linear_targets(config) if adapter.targets(each.module, linear=each.linear)]
    if not any(each.label in _OF_EXPERTS for each in meant):
        return
    whole = family_of(config.model_type).vision is not None  # whose parts share ends of names
    names = {name: each for each in meant for name in (_spelled(each, whole=whole),)}
    document["target_modules"] = [name for name, each in names.items() if each.label not in _OF_EXPERTS]
    weights = [f"{name}.weight" for name, each in names.items() if each.label in _OF_EXPERTS]
    document["target_parameters"] = [*(document.get("target_parameters") or ()), *weights]


def _spelled(target: Target, *, whole: bool) -> str:
    """The end of its name with which no routed expert's ends."""
    if whole:
        return target.module
    owner, label = target.module.split(".")[:-1], target.label
    return ".".join([*owner[-2 if owner[-1].isdigit() else -1 :], label])


def _means_all(document: JsonObject) -> bool:
    targets = document.get("target_modules")
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


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


def _named(name: str) -> str:
    return rf"(.*\.)?{re.escape(name)}"


def _beginning_with(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"
