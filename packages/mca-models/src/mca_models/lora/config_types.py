"""Types of the values of an ``adapter_config.json``, as PEFT has them.

`config` says which values are supported.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping

from mca_config.types import Typed, Values

_LARGEST_RANK = 1 << 16


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < math.inf


def _is_list(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _map_to(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_names = _is_list(_is_name)
_Kind = tuple[Callable[[object], bool], str]
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
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")


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
