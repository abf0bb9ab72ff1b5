"""``adapter_config.json`` of PEFT's LoRA: read, checked, matched against module names.

Every setting that changes the result is either supported or raises an error that names it; the document
itself is kept verbatim, so that writing it again loses nothing.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mca_config.errors import raise_problems
from mca_config.files import read_json, resolve_inside
from mca_config.types import Typed, Values

_LARGEST_RANK = 1 << 16
_PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}
_Kind = tuple[Callable[[object], bool], str]
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")
FILE_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes depend on whole columns of the merged weight",
    "lora_bias": "Megatron's adapters have no bias on lora_B",
    "use_qalora": "it pools the inputs",
    "use_bdlora": "block-diagonal factors are laid out for one tensor-parallel size",
    "alora_invocation_tokens": "activated LoRA depends on the prompt",
    "arrow_config": "Arrow routes between several adapters",
    "velora_config": "VeLoRA compresses activations",
    "monteclora_config": "MonteCLoRA samples its factors",
    "kasa_config": "KaSA changes the base weights",
    "layer_replication": "it changes the number of layers",
    "trainable_token_indices": "single trained rows have no place in the embedding; use modules_to_save",
    "megatron_config": "this is for PEFT's own parallel linears; leave it out",
    "loftq_config": "LoftQ quantises the base weights",
}
"""Unsupported settings with the reason; they must be absent, null, false or empty."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the first adapter from the base weights."""
_HARMLESS = frozenset(
    "peft_type peft_version auto_mapping base_model_name_or_path revision task_type inference_mode r "
    "target_modules exclude_modules target_parameters lora_alpha lora_dropout bias use_rslora "
    "modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern "
    "megatron_core eva_config corda_config lora_ga_config qalora_group_size ensure_weight_tying "
    "runtime_config fan_in_fan_out".split()
)
"""Keys that are read here, or that say nothing about what the finished adapter computes (PEFT corrects the last)."""


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _map_to(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_names = _is_list(_is_name)
_NUMBERS: Mapping[str, _Kind] = {
    "r": (_is_rank, f"a whole number from 1 to {_LARGEST_RANK}"),
    "lora_alpha": (_is_alpha, "a finite number"),
}
"""Keys that may be absent, but not null."""
_OTHERS: Mapping[str, _Kind] = {
    "rank_pattern": (_map_to(_is_rank), f"an object of whole numbers from 1 to {_LARGEST_RANK}"),
    "alpha_pattern": (_map_to(_is_alpha), "an object of finite numbers"),
    "lora_dropout": (_is_share, "a number from 0 to 1"),
    "target_modules": (lambda value: _is_name(value) or _names(value), "a pattern or a list of names"),
    "exclude_modules": (lambda value: _is_name(value) or _names(value), "a pattern or a list of names"),
    "target_parameters": (_names, "a list of names"),
    "modules_to_save": (_names, "a list of names"),
    "layers_to_transform": (
        lambda value: _is_layer(value) or _is_list(_is_layer)(value),
        "a layer's number or a list of them",
    ),
    "layers_pattern": (lambda value: _is_name(value) or _names(value), "a name or a list of names"),
    "bias": (_is_name, "a word"),
    "init_lora_weights": (lambda value: isinstance(value, bool | str), "true, false or a word"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
}
"""Keys that may also be null, which means absent."""


def value_problems(document: Values) -> list[str]:
    """All that has another type than it must have, and patterns that cannot be matched."""
    wrong = list(_wrong_types(document))
    return wrong or list(_wrong_patterns(document))


def _wrong_types(document: Values) -> Iterator[str]:
    for table, nullable in ((_NUMBERS, False), (_OTHERS, True)):
        for key, (fits, words) in table.items():
            if key not in document or (nullable and document[key] is None):
                continue
            if not fits(document[key]):
                yield f"{key} must be {words}, not {document[key]!r:.80}"


def _wrong_patterns(document: Values) -> Iterator[str]:
    for key in _PATTERNS:
        value = document.get(key)
        patterns = [value] if isinstance(value, str) else value if key == "layers_pattern" else None
        yield from _faults(key, patterns or [])
    for key in ("rank_pattern", "alpha_pattern"):
        yield from _faults(key, document.get(key) or {})
    yield from _faults("modules_to_save", document.get("modules_to_save") or [])


def _faults(key: str, patterns: Typed) -> Iterator[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield f"{key}: {pattern!r:.80} is no regular expression ({error})"


@dataclass(frozen=True)
class AdapterConfig:
    """Configuration of a PEFT LoRA adapter.

    Args:
        document: The parsed ``adapter_config.json``.
    """

    document: Values

    @staticmethod
    def from_dict(document: Values, where: object = FILE_NAME) -> "AdapterConfig":
        """Check ``document``; ``where`` names it in errors.

        Raises:
            McaError: It is no LoRA adapter, or has settings that cannot be represented (all are named).
        """
        raise_problems(_problems(document), where)
        return AdapterConfig(document)

    @staticmethod
    def load(directory: Path) -> "AdapterConfig":
        """Read ``adapter_config.json`` in ``directory``."""
        path = resolve_inside(directory, FILE_NAME)
        return AdapterConfig.from_dict(read_json(path, "a PEFT adapter directory holds one"), path)

    def to_json(self) -> str:
        """The text of ``adapter_config.json``; of patterns the first that matches counts, so they stay in order."""
        document = {key: self.document[key] for key in sorted(self.document)}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        """End of the names of modules that are trained and saved whole."""
        return tuple(self.document.get("modules_to_save") or ())

    @property
    def dropout(self) -> float:
        """Probability with which an input of lora_A is dropped in training."""
        return float(self.document.get("lora_dropout") or 0.0)

    def targets(self, module: str, *, linear: bool = True) -> bool:
        """Return whether HF ``module`` gets an adapter.

        Args:
            module: Full name, e.g. ``model.layers.0.self_attn.q_proj``.
            linear: ``all-linear`` means it too (routers and the output layer are not meant).
        """
        if self._excluded(module):
            return False
        target = self.document.get("target_modules")
        if isinstance(target, str):
            if target.lower() == ALL_LINEAR:
                return linear
            return re.fullmatch(target, module) is not None
        names = target or ()
        return ends_with(module, names) and (module in names or self._in_layers(module))

    def targets_parameter(self, name: str) -> bool:
        """Return whether HF parameter ``name`` (``model.layers.0.mlp.experts.gate_up_proj``) gets an adapter."""
        return ends_with(name, self.document.get("target_parameters") or ())

    def saves(self, tensor: str) -> bool:
        """Return whether HF ``tensor`` belongs to a module of ``modules_to_save``."""
        parents = tensor.split(".")[:-1]
        modules = [".".join(parents[: i + 1]) for i in range(len(parents))]
        return any(module.endswith(entry) for module in modules for entry in self.modules_to_save)

    def rank(self, module: str) -> int:
        """Rank of the adapter on ``module``."""
        return int(self._pattern_value("rank_pattern", module, "r"))

    def scale(self, module: str) -> float:
        """The factor of ``lora_B @ lora_A`` on ``module``."""
        alpha, rank = self.alpha(module), self.rank(module)
        return float(alpha / math.sqrt(rank) if self.document.get("use_rslora") else alpha / rank)

    def alpha(self, module: str) -> float:
        """Return the alpha of ``module``, from which ``scale`` follows."""
        alpha: float = self._pattern_value("alpha_pattern", module, "lora_alpha")
        return alpha

    def _pattern_value(self, patterns: str, module: str, key: str) -> Typed:
        for pattern, value in (self.document.get(patterns) or {}).items():
            if self.names(pattern, module):
                return value
        return self.without_pattern(key)

    def without_pattern(self, key: str) -> Typed:
        """Return ``r`` or ``lora_alpha``, which hold where no pattern matches."""
        return self.document.get(key, _PEFT_DEFAULTS[key])

    def names(self, pattern: str, module: str) -> bool:
        """Return whether ``pattern`` of ``rank_pattern`` or ``alpha_pattern`` means ``module``."""
        return re.match(rf"(.*\.)?({pattern})$", module) is not None

    def _excluded(self, module: str) -> bool:
        exclude = self.document.get("exclude_modules") or ()
        if isinstance(exclude, str):
            excluded = re.fullmatch(exclude, module) is not None
        else:
            excluded = ends_with(module, exclude)
        saved = (rf"(^|.*\.){name}($|\..*)" for name in self.modules_to_save)
        return excluded or any(re.match(pattern, module) for pattern in saved)

    def _in_layers(self, module: str) -> bool:
        wanted = self.document.get("layers_to_transform")
        if wanted is None or wanted == []:
            return True
        patterns = self.document.get("layers_pattern") or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if match := re.match(rf"(?:^|.*?\.)(?:{pattern})\.(\d+)\.", module):
                return int(match[match.lastindex or 1]) in ([wanted] if isinstance(wanted, int) else wanted)
        return False


def ends_with(name: str, ends: Iterable[str]) -> bool:
    """Return whether the last words of ``name`` are one of ``ends``."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _problems(document: Values) -> Iterator[str]:
    kind = document.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {kind!r}; only LORA adapters are supported"
        return
    yield from (wrong := value_problems(document))
    if wrong:
        return
    if document.get("bias", "none") != "none":
        yield f"bias is {document['bias']!r}; only 'none' is supported (biases are not trained)"
    for key, why in _REFUSED.items():
        if document.get(key):
            yield f"{key} is not supported: {why}"
    start = document.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        yield (
            f"init_lora_weights {start!r} changed the base weights, so the adapter fits no published model; save it "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    if isinstance(document.get("target_modules"), str) and document.get("layers_to_transform") is not None:
        yield "layers_to_transform needs target_modules to be a list of names, as in PEFT"
    unknown = [key for key, value in document.items() if value and key not in _REFUSED.keys() | _HARMLESS]
    for key in sorted(unknown):
        yield f"{key} is not known; a newer PEFT may have added it"
    if not (document.get("target_modules") or document.get("target_parameters")):
        yield "target_modules and target_parameters name nothing"
