"""Entries of an adapter's configuration that name nothing of a model: PEFT passes over most of them in silence.

What they name if they do is said in `config`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from mca_config.model_config import McaModelConfig
from mca_models.lora.config import ALL_LINEAR, AdapterConfig, ends_with
from mca_models.lora.parts import own_modules_to_save
from mca_models.lora.targets import UNSAVED, Target, linear_targets, stacked_targets
from mca_models.templates import family_of
from mca_models.weights import Param


def unmatched(config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]) -> Iterator[str]:
    """Yields each such entry, in words.

    Args:
        config: The model.
        adapter: The adapter's configuration.
        adapted: What of the model has factors.
    """
    nothing = f"names nothing of this {config.model_type} model"
    found = _both_names(adapted)
    for key in ("target_modules", "target_parameters"):
        left = _not_among(found, _entries(adapter, key))
        for entry in left and _not_among(_targets(config), left):
            alone = "it stands alone; remove the other names, or name the linears instead of it"
            yield f"{key}: {entry!r} {nothing}; {alone if entry == ALL_LINEAR else 'correct or remove it'}"
    saved, excluded = own_modules_to_save(adapter), _entries(adapter, "exclude_modules")
    params = _params(config) if saved or excluded else []
    for entry in excluded and _not_among(_modules(params), excluded):
        yield f"exclude_modules: {entry!r} {nothing}; correct or remove it"
    whole = [name for param in params if param.stage not in UNSAVED for name in param.hf_names()]
    for entry in saved:
        if not any(AdapterConfig({"modules_to_save": [entry]}).saves(name) for name in whole):
            yield f"modules_to_save: {entry!r} {nothing} that can be saved whole; correct or remove it"
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in adapter.document.get(key) or ():
            if not any(adapter.names(pattern, name) for name in found):
                yield f"{key}: {pattern!r} matches nothing that is adapted; correct or remove it"


def _entries(adapter: AdapterConfig, key: str) -> list[str]:
    value = adapter.document.get(key)
    return list(value) if isinstance(value, list) else []


def _not_among(names: Collection[str], entries: Iterable[str]) -> list[str]:
    return [entry for entry in entries if not any(ends_with(name, [entry]) for name in names)]


def _both_names(targets: Iterable[Target]) -> list[str]:
    return [name for target in targets for name in (target.module, f"{target.module}.weight")]


def _targets(config: McaModelConfig) -> list[str]:
    return _both_names([*linear_targets(config), *stacked_targets(config)])


def _params(config: McaModelConfig) -> list[Param]:
    family = family_of(config.model_type)
    return family.params(family.as_modules(config))


def _modules(params: Iterable[Param]) -> set[str]:
    words = [name.split(".") for param in params for name in param.hf_names()]
    return {".".join(each[:count]) for each in words for count in range(1, len(each))}
