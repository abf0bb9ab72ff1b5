"""What PEFT would take otherwise is written into a new adapter's configuration: modules left out, named, or saved.

What else a configuration says is read in `config`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.lora.config import ALL_LINEAR, AdapterConfig, ends_with
from mca_models.lora.targets import Target, linear_targets
from mca_models.lora.unread import TURNED
from mca_models.templates import family_of

_OF_EXPERTS = frozenset("gate gate_proj up_proj down_proj w1 w2 w3".split())
"""What PEFT takes for the stacked weights of routed experts, in all models of their types."""
_HEADS = ("classifier", "score")
_HEAD_TASKS = ("SEQ_CLS", "TOKEN_CLS")


def save_head(document: JsonObject) -> None:
    """Has an adapter of a model with a head for scores train and save that, as PEFT does.

    Args:
        document: Of ``adapter_config.json``; it is changed.
    """
    if document.get("task_type") in _HEAD_TASKS:
        own = list(document.get("modules_to_save") or ())
        document["modules_to_save"] = [*own, *(name for name in _HEADS if name not in own)]


def own_modules_to_save(adapter: AdapterConfig) -> Sequence[str]:
    """Those that are not PEFT's own, of which a model has one."""
    theirs = _HEADS if adapter.document.get("task_type") in _HEAD_TASKS else ()
    return [name for name in adapter.modules_to_save if name not in theirs]


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
    """Names linears of a model with experts where PEFT takes ``target_modules`` for something else.

    PEFT turns the names of linears that routed experts had in transformers 4 into those of their stacked weights:
    those that ``all-linear`` means, and in models of most types those that are given. It would not read the factors
    of shared experts and of dense layers, whose linears have the same names. By the names of their weights it does.
    These are named one by one where some with the same end of a name are left out or differ, and patterns name them
    too, so that they have the ranks and scales that they had as modules.

    Args:
        document: Of ``adapter_config.json``, with what it excludes; it is changed.
        config: Of the model.
    """
    turned = _means_all(document) or config.model_type in TURNED
    if not turned or not config.num_moe_experts or document.get("lora_dropout"):
        return  # with dropout PEFT takes no parameters
    adapter = AdapterConfig.from_dict(document)
    targets = linear_targets(config)
    meant = [each for each in targets if adapter.targets(each.module, linear=each.linear)]
    alike = [each for each in meant if each.linear and each.label in _OF_EXPERTS]
    if not alike:
        return
    modules = {each.module for each in meant}
    left = [each.module for each in targets if each.module not in modules]
    weights = {
        f"{name}.weight": each
        for end, group in _by_end(alike, config).items()
        for name, each in _spelled(end, group, adapter, left).items()
    }
    others = [each for each in meant if each not in alike]
    if _means_all(document):
        document["target_modules"] = list(_by_end(others, config))
    elif not isinstance(given := document["target_modules"], str):
        document["target_modules"] = [name for name in given if _keeps(name, others, alike)]
    document["target_parameters"] = [*(document.get("target_parameters") or ()), *weights]
    _extend_patterns(document, adapter, weights)


def _by_end(targets: Iterable[Target], config: McaModelConfig) -> Mapping[str, list[Target]]:
    whole = family_of(config.model_type).vision is not None  # whose parts share ends of names
    groups: dict[str, list[Target]] = {}
    for each in targets:
        groups.setdefault(each.module if whole else _end(each), []).append(each)
    return groups


def _keeps(name: str, others: Iterable[Target], alike: Iterable[Target]) -> bool:
    """Whether a given name means more than what parameters name now, or nothing at all."""
    found = any(ends_with(each.module, [name]) for each in others)
    return found or not any(ends_with(each.module, [name]) for each in alike)


def _end(target: Target) -> str:
    """The end of its name with which no routed expert's ends."""
    owner, label = target.module.split(".")[:-1], target.label
    return ".".join([*owner[-2 if owner[-1].isdigit() else -1 :], label])


def _spelled(
    end: str, group: Sequence[Target], adapter: AdapterConfig, left: Iterable[str]
) -> Mapping[str, Target]:
    """A name for all of ``group``, whose names end in ``end``, or one for each: they differ, or some are ``left``."""
    alike = len({_sizes(adapter, each) for each in group}) == 1
    if alike and not any(name.endswith(f".{end}") for name in left):
        return {end: group[0]}
    return {each.module: each for each in group}


def _sizes(adapter: AdapterConfig, target: Target) -> tuple[float, ...]:
    names = (target.module, f"{target.module}.weight")
    return tuple(size for name in names for size in (adapter.rank(name), adapter.alpha(name)))


def _extend_patterns(document: JsonObject, adapter: AdapterConfig, weights: Mapping[str, Target]) -> None:
    """Gives ``weights``, by their names in ``target_parameters``, the ranks and alphas of their modules."""
    for key, of in (("rank_pattern", adapter.rank), ("alpha_pattern", adapter.alpha)):
        own = {
            re.escape(name): of(each.module)
            for name, each in weights.items()
            if of(each.module) != of(f"{each.module}.weight")
        }
        if own:
            document[key] = {**own, **(document.get(key) or {})} | own


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
