"""Entries of an adapter's configuration that match nothing in a model: PEFT ignores most of them silently.

`config` matches the entries.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from mca_config.model_config import McaModelConfig
from mca_models.lora.config import ALL_LINEAR, AdapterConfig, ends_with
from mca_models.lora.peft_names import extra_modules_to_save
from mca_models.lora.targets import UNSAVED, Target, linear_targets, stacked_targets
from mca_models.templates import get_family
from mca_models.weights import Param

_NAMED = {"target_modules": "module", "target_parameters": "parameter"}
"""Kind of the entries of each list."""


def unmatched_entries(
    config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]
) -> Iterator[str]:
    """Yield a message for each entry that matches nothing, apart from ``exclude_modules``.

    Args:
        config: The model.
        adapter: The adapter's configuration.
        adapted: What of the model has factors.
    """
    nothing = f"names nothing of this {config.model_type} model"
    for key in _NAMED:
        if left := _not_among(_names(adapted, key), _entries(adapter, key)):
            yield from _misnamed(config, key, left)
    saved, found = extra_modules_to_save(adapter), _both_names(adapted)
    params = _params(config) if saved else []
    whole = [name for param in params if param.stage not in UNSAVED for name in param.hf_names()]
    for entry in saved:
        if not any(AdapterConfig({"modules_to_save": [entry]}).saves(name) for name in whole):
            yield f"modules_to_save: {entry!r} {nothing} that can be saved whole; correct or remove it"
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in adapter.document.get(key) or ():
            if not any(adapter.names(pattern, name) for name in found):
                yield f"{key}: {pattern!r} matches nothing that is adapted; correct or remove it"


def ineffective_exclusions(config: McaModelConfig, adapter: AdapterConfig) -> Iterator[str]:
    """Yield a message for each entry of ``exclude_modules`` that is no module with weights."""
    excluded = _entries(adapter, "exclude_modules")
    for entry in excluded and _not_among(_modules(_params(config)), excluded):
        yield f"exclude_modules: {entry!r} excludes nothing of this {config.model_type} model; correct or remove it"


def _misnamed(config: McaModelConfig, key: str, entries: Sequence[str]) -> Iterator[str]:
    """Yield a message for each of ``entries`` that matches nothing in ``key``."""
    model, targets = f"this {config.model_type} model", [*linear_targets(config), *stacked_targets(config)]
    (other,) = _NAMED.keys() - {key}
    for entry in _not_among(_names(targets, key), entries):
        if entry == ALL_LINEAR:
            what = f"names nothing of {model}; it must be the only value"
            remedy = "remove the other names, or name the linears instead of it"
        elif not _not_among(_names(targets, other), [entry]):
            what, remedy = f"is a {_NAMED[other]} of {model}, not a {_NAMED[key]}", f"move it to {other}"
        elif _not_among(_present(config, key), [entry]):
            what, remedy = f"names nothing of {model}", "correct or remove it"
        else:
            what, remedy = f"is a {_NAMED[key]} of {model} that cannot carry an adapter here", "remove it"
        yield f"{key}: {entry!r} {what}; {remedy}"


def _entries(adapter: AdapterConfig, key: str) -> list[str]:
    value = adapter.document.get(key)
    return list(value) if isinstance(value, list) else []


def _not_among(names: Collection[str], entries: Iterable[str]) -> list[str]:
    return [entry for entry in entries if not any(ends_with(name, [entry]) for name in names)]


def _both_names(targets: Iterable[Target]) -> list[str]:
    return [name for target in targets for name in (target.module, f"{target.module}.weight")]


def _names(targets: Iterable[Target], key: str) -> list[str]:
    """Return the names by which ``targets`` can be given in ``key``: stacked parameters are no modules."""
    if key == "target_modules":
        return [target.module for target in targets if not target.stacked]
    return [target.module if target.stacked else f"{target.module}.weight" for target in targets]


def _present(config: McaModelConfig, key: str) -> set[str]:
    """Return the names of all modules or parameters that ``key`` could name."""
    params = _params(config)
    return _modules(params) if key == "target_modules" else {n for param in params for n in param.hf_names()}


def _params(config: McaModelConfig) -> list[Param]:
    family = get_family(config.model_type)
    return family.params(family.with_module_names(config))


def _modules(params: Iterable[Param]) -> set[str]:
    words = [name.split(".") for param in params for name in param.hf_names()]
    return {".".join(each[:count]) for each in words for count in range(1, len(each))}
