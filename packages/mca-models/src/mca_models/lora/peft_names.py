"""Names in a new adapter's configuration that make PEFT adapt, exclude and save the same modules as mca.

`config` reads all other settings. A warning names factors of single experts, which PEFT does not load as they are, and
entries that match nothing in a model, most of which PEFT ignores silently.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Typed
from mca_models.lora.config import ALL_LINEAR, AdapterConfig, ends_with
from mca_models.lora.targets import UNSAVED, Target, linear_targets, named_params, stacked_targets
from mca_models.templates import get_family
from mca_models.weights import Param, Stage

_NOT_BUILT = (Stage.MTP, Stage.PASSTHROUGH)
"""Parameters that HF models do not have."""
_NAMING = ("target_modules", "target_parameters", "modules_to_save")
_MOST_SHOWN = 8
_HEADS = ("classifier", "score")
_HEAD_TASKS = ("SEQ_CLS", "TOKEN_CLS")
FUSING_MODEL_TYPES = frozenset(
    "afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe "
    "glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax minimax_m2 mixtral olmoe "
    "qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker sarvam_mla solar_open".split()
)
"""Types of models in which PEFT turns names of routed experts' linears into those of their stacked weights."""
EXPERT_LINEARS = frozenset("gate gate_proj up_proj down_proj w1 w2 w3".split())
"""Names of linears that PEFT takes for the router and the stacked weights of routed experts in these models."""
_DOWN = frozenset({"down_proj", "w2"})


def complete_peft_config(
    document: JsonObject, config: McaModelConfig, adapted: Collection[str]
) -> str | None:
    """Complete a new adapter's configuration so that PEFT reads it as mca does.

    Args:
        document: Of ``adapter_config.json``; it is changed.
        config: Of the model.
        adapted: Of ``language``, ``vision``, ``audio`` and ``projector``, those that get an adapter.

    Returns:
        A line for the log if names were replaced, else None.
    """
    save_head(document)
    exclude_unadapted(document, config, adapted)
    given = dict(document)
    if not name_targets(document, config):
        return None
    changed = (_shown(key, document[key]) for key in _NAMING if document.get(key) != given.get(key))
    return (
        f"PEFT would adapt or save other modules of this {config.model_type} model; adapter_config.json therefore "
        f"names what is trained: {'; '.join(changed)}"
    )


def _shown(key: str, value: Typed) -> str:
    names = list(value)
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"{key} {', '.join(names[:_MOST_SHOWN]) or 'none'}{more}"


def save_head(document: JsonObject) -> None:
    """Add the classification head to ``modules_to_save``, as PEFT does.

    Args:
        document: Of ``adapter_config.json``; it is changed.
    """
    if document.get("task_type") in _HEAD_TASKS:
        own = list(document.get("modules_to_save") or ())
        document["modules_to_save"] = [*own, *(name for name in _HEADS if name not in own)]


def extra_modules_to_save(adapter: AdapterConfig) -> Sequence[str]:
    """Return the modules to save that PEFT does not add itself."""
    theirs = _HEADS if adapter.document.get("task_type") in _HEAD_TASKS else ()
    return [name for name in adapter.modules_to_save if name not in theirs]


def exclude_unadapted(document: JsonObject, config: McaModelConfig, adapted: Collection[str]) -> None:
    """Exclude modules that PEFT would adapt in addition.

    These are parts of a vision-language model that share names of modules with others, and modules that
    ``all-linear`` means and that PEFT cannot adapt.

    Args:
        document: Of ``adapter_config.json``; it is changed.
        config: Of the model; one of text alone has no parts.
        adapted: Of ``language``, ``vision``, ``audio`` and ``projector``.
    """
    unadaptable = (
        sorted(get_family(config.model_type).text(config).unadaptable) if _means_all(document) else ()
    )
    left = [*_parts_left(config, adapted), *map(_named, unadaptable)]
    if left:
        given = document.get("exclude_modules") or []
        own = [given] if isinstance(given, str) else map(_named, given)
        document["exclude_modules"] = "|".join([*own, *left])


def name_targets(document: JsonObject, config: McaModelConfig) -> bool:
    """Name what is adapted wherever PEFT would adapt something else; return whether it would.

    - In models of some types PEFT turns names of linears that routed experts had in transformers 4 into those of their
      stacked weights, and adds these and the router to ``all-linear``. Shared experts and dense layers have linears
      of the same names: they are named by their weights, in ``target_parameters``. So are routers.
    - In these models PEFT reduces a regular expression to the last words of what it matches, in all layers.
    - A name or a regular expression may match modules that have no adapter here, such as those that choose keys.
    - A name in ``modules_to_save`` may match modules of the vision model, which are not saved.

    Args:
        document: Of ``adapter_config.json``, with what it excludes; it is changed.
        config: Of the model.
    """
    before = dict(document)
    adapter = AdapterConfig.from_dict(document)
    given = document.get("target_modules")
    if given:
        found = _AdapterNames(adapter, config, every=_means_all(document))
        weights = found.named_weights()
        if isinstance(given, list):
            document["target_modules"] = list(
                dict.fromkeys(name for each in given for name in found.kept(each))
            )
        elif found.is_misread(given):
            document["target_modules"] = list(found.ends(found.modules))
        if weights:
            document["target_parameters"] = [*(document.get("target_parameters") or ()), *weights]
            _extend_patterns(document, adapter, weights)
    if adapter.modules_to_save and get_family(config.model_type).vision is not None:
        document["modules_to_save"] = list(_named_saved(adapter, config))
    return document != before


class _AdapterNames:
    """Modules and weights of a model that a configuration names.

    Args:
        adapter: The configuration.
        config: The model.
        every: Its ``target_modules`` is ``all-linear``.

    Attributes:
        weights: Linears and routers that are named by their weights.
        modules: The other ones that are adapted.
    """

    def __init__(self, adapter: AdapterConfig, config: McaModelConfig, *, every: bool) -> None:
        self._adapter, self._every = adapter, every
        self._turned = config.model_type in FUSING_MODEL_TYPES
        self._experts = bool(config.num_experts)
        targets = linear_targets(config)
        meant = [each for each in targets if adapter.targets(each.module, linear=each.linear)]
        self.weights = list(filter(self._is_by_weight, meant))
        self.modules = [each for each in meant if not self._is_by_weight(each)]
        names = {each.module for each in meant}
        self._others = {*_module_names(config), *(each.module for each in targets)} - names

    def _is_by_weight(self, target: Target) -> bool:
        if target.base.expert is not None or not self._experts or self._adapter.dropout:
            return False  # with dropout PEFT adapts no parameters
        return target.is_router or ((self._turned or self._every) and target.label in EXPERT_LINEARS)

    def is_misread(self, given: str) -> bool:
        """Return whether PEFT takes ``given``, a regular expression or ``all-linear``, for something else."""
        if self._every or self._turned:
            return self._experts
        return bool(self.weights) or any(map(self._adapter.targets, self._others))

    def kept(self, name: str) -> list[str]:
        """Names for what ``name`` in a list means, without what is named by its weight; itself where it is right.

        A name of modules that cannot carry an adapter stays too: it is reported with the names that match nothing.
        """
        mine = [each for each in self.modules if ends_with(each.module, [name])]
        if not mine:
            return [] if any(ends_with(each.module, [name]) for each in self.weights) else [name]
        if any(ends_with(other, [name]) and self._adapter.targets(other) for other in self._others):
            return list(self.ends(mine))
        return [name]

    def ends(self, targets: Sequence[Target], *more: Target) -> Mapping[str, list[Target]]:
        """The shortest ends of the names of ``targets`` with which neither those of others nor of ``more`` end."""
        taken = {end for name in (*self._others, *(each.module for each in more)) for end in _ends(name)}
        groups: dict[str, list[Target]] = {}
        for each in targets:
            end = next((end for end in _ends(each.module) if end not in taken), each.module)
            groups.setdefault(end, []).append(each)
        return groups

    def named_weights(self) -> Mapping[str, Target]:
        """The names of ``weights`` as parameters, each with one of those that it means, which are of the same sizes."""
        named: dict[str, Target] = {}
        for end, group in self.ends(self.weights, *self.modules).items():
            alike = len({_sizes(self._adapter, each) for each in group}) == 1
            named |= (
                {f"{end}.weight": group[0]} if alike else {f"{each.module}.weight": each for each in group}
            )
        return named


def _ends(name: str) -> Iterator[str]:
    """The last word of ``name``, its last two words, ..., and all of it."""
    words = name.split(".")
    return (".".join(words[-count:]) for count in range(1, len(words) + 1))


def _module_names(config: McaModelConfig) -> set[str]:
    """All modules of the HF model that have weights, and those that hold them."""
    return _modules(each for each in named_params(config) if each.stage not in _NOT_BUILT)


def _named_saved(adapter: AdapterConfig, config: McaModelConfig) -> Iterator[str]:
    """``modules_to_save``; a name that modules of the vision model have too is replaced by those of the others."""
    params = named_params(config)
    for entry in adapter.modules_to_save:
        saved = AdapterConfig({"modules_to_save": [entry]})
        found = [(each.stage, name) for each in params for name in each.hf_names() if saved.saves(name)]
        if all(stage is not Stage.VISION for stage, _ in found):
            yield entry
        else:
            yield from dict.fromkeys(name.rpartition(".")[0] for stage, name in found if stage not in UNSAVED)


def _sizes(adapter: AdapterConfig, target: Target) -> tuple[float, ...]:
    names = (target.module, f"{target.module}.weight")
    return tuple(size for name in names for size in (adapter.rank(name), adapter.alpha(name)))


def _extend_patterns(document: JsonObject, adapter: AdapterConfig, weights: Mapping[str, Target]) -> None:
    """Give ``weights``, by their names in ``target_parameters``, the ranks and alphas of their modules."""
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
    family = get_family(config.model_type)
    if family.vision is None:
        return []
    spelling = family.vision.spelling(family.with_module_names(config))
    audio = () if family.vision.audio is None else family.vision.audio.names
    towers = _beginning_with(spelling.vision.values())
    projectors, audio_towers = (
        [*map(spelling.vision_to_file, prefixes)] for prefixes in (family.vision.projector, audio)
    )
    patterns = {
        "language": f"(?!{towers}).*",
        "vision": f"(?!{_beginning_with([*projectors, *audio_towers])}){towers}.*",
        "audio": f"(?!{_beginning_with(projectors)}){_beginning_with(audio_towers)}.*",
        "projector": f"{_beginning_with(projectors)}.*",
    }
    found = {"language", *family.vision.parts(config)}
    left = [pattern for part, pattern in patterns.items() if part in found and part not in adapted]
    if family.vision.fused_qkv and "vision" in adapted:  # three linears of PEFT's, one of mca's
        left.append(rf"{towers}.*\.[qkv]_proj")
    return left


def _named(name: str) -> str:
    return rf"(.*\.)?{re.escape(name)}"


def _beginning_with(names: Iterable[str]) -> str:
    """Return a pattern for names of modules; a name with a point at its end is that of a module with its parts."""
    patterns = (
        re.escape(name.removesuffix(".")) + (r"(?![^.])" if name.endswith(".") else "") for name in names
    )
    return f"(?:{'|'.join(patterns)})"


def peft_load_warnings(
    config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]
) -> Iterator[str]:
    """Yield a message for each kind of factors that PEFT would leave out, scale differently or not load.

    Args:
        config: The model.
        adapter: The adapter's configuration.
        adapted: What of the model has factors.
    """
    if not get_family(config.model_type).in_transformers:
        return
    yield from _undropped(config, adapter, adapted)
    own = [each for each in adapted if each.base.expert is not None and not each.stacked]
    if not own or _is_joined(config, adapter, own):
        return
    named = {each.label for each in own}
    stacks = dict.fromkeys(".".join(each.module.split(".")[-3:]) for each in stacked_targets(config))
    yield (
        f"target_modules: each routed expert has its own factors for {', '.join(sorted(named))}, which PEFT on "
        f"transformers 5 leaves out or scales otherwise in this {config.model_type} model; to load the adapter "
        f"there, name {', '.join(stacks)} in target_parameters instead"
    )


def _undropped(config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]) -> Iterator[str]:
    """Yield what PEFT takes for parameters, which it does not adapt with dropout."""
    turned = EXPERT_LINEARS if config.model_type in FUSING_MODEL_TYPES else ()
    found = dict.fromkeys(
        each.label for each in adapted if not each.stacked and (each.is_router or each.label in turned)
    )
    if adapter.dropout and config.num_experts and found:
        yield (
            f"lora_dropout: PEFT on transformers 5 adapts {', '.join(found)} of this {config.model_type} model as "
            "parameters, without dropout, and refuses to load the adapter; set lora_dropout to 0, or name them in "
            "exclude_modules"
        )


def _is_joined(config: McaModelConfig, adapter: AdapterConfig, own: Sequence[Target]) -> bool:
    """Return whether PEFT makes factors of stacked weights out of all factors of single experts, ``own``."""
    if config.model_type not in FUSING_MODEL_TYPES:
        return False
    every = [each for each in linear_targets(config) if each.base.expert is not None]
    labels = {each.label for each in own}
    complete = len(own) == sum(each.label in labels for each in every)
    known = labels == {each.label for each in every} or labels <= _DOWN
    return complete and known and not _scaled(adapter, [each for each in own if each.label not in _DOWN])


def _scaled(adapter: AdapterConfig, joined: Sequence[Target]) -> bool:
    """Return whether PEFT scales the joined factors differently: it doubles rank and alpha of the whole adapter."""
    usual = adapter.without_pattern("r"), adapter.without_pattern("lora_alpha")
    sizes = {(adapter.rank(each.module), adapter.alpha(each.module)) for each in joined}
    return bool(sizes) and (bool(adapter.document.get("use_rslora")) or sizes != {usual})


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
    params = named_params(config) if saved else []
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
    for entry in excluded and _not_among(_modules(named_params(config)), excluded):
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
    params = named_params(config)
    return _modules(params) if key == "target_modules" else {n for param in params for n in param.hf_names()}


def _modules(params: Iterable[Param]) -> set[str]:
    words = [name.split(".") for param in params for name in param.hf_names()]
    return {".".join(each[:count]) for each in words for count in range(1, len(each))}
