"""Values by name become dataclasses here: every key known, every value of the type that its field declares.

JSON has types of its own, so that its values are taken as they are. YAML and command lines give words, which are read:
``1e-4`` (text to YAML 1.1) is a number where a number is declared. What a key is for, and whether values fit together,
is not known here.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union

from mca_config.errors import McaError, UsageError, problems_of, raise_problems
from mca_config.redaction import is_secret
from mca_config.types import JsonObject, Typed, Values

T = TypeVar("T")
TypeHint = Any
"""The type of a field as it is found at run time: a class, a union, a ``Literal``; no type says which."""


def from_json(cls: type[T], values: Values, where: str) -> T:
    """An instance of dataclass ``cls`` from JSON ``values``; ``where`` names them in errors.

    Raises:
        McaError: As `build` does.
    """
    advice = "remove it, or read the file with the version of mca that wrote it"
    made = build(
        [cls], values, where=where, unknown=lambda key, _: f"unknown key {key}; {advice}", words=False
    )
    return typing.cast(T, made[0])


def to_json(instance: Any) -> JsonObject:
    """The fields of a dataclass instance, those with default values included, not recursing into dicts."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def build(
    classes: Sequence[type],
    values: Values,
    *,
    where: str,
    unknown: Callable[[str, Iterable[str]], str],
    only: Iterable[str] = (),
    words: bool = True,
) -> tuple[Typed, ...]:
    """One instance of each of ``classes`` from ``values``; every key must be a field of one of them.

    Args:
        classes: Dataclasses; a key that several have goes to all of them.
        values: Keys and values.
        where: What to name in an error: the file, or the file and the command line.
        unknown: What to say of a key that no class has, given all that they have.
        only: Names that must have a value although some class has a default for them.
        words: The values come from YAML or a command line, where all may be text; an error is then a `UsageError`.

    Raises:
        McaError: Unknown keys, missing ones, values of a wrong type, and what the classes themselves refuse: all of it.
    """
    fields = [_init_fields(cls) for cls in classes]
    known = {name: None for table in fields for name in table}  # in the order of the classes
    problems = [unknown(key, known) for key in values if key not in known]
    required = {name for table in fields for name, (_, needed) in table.items() if needed}
    lacking = {name for name in required if name not in values or (words and _is_empty(values[name]))}
    if missing := sorted(lacking | {name for name in only if _is_empty(values.get(name))}):
        problems.append(f"missing {', '.join(missing)}")
    built = []
    for cls, table in zip(classes, fields, strict=True):
        found, unfit = _cast_all(cls, table, values, words)
        problems += unfit
        if unfit or not {name for name, (_, needed) in table.items() if needed} <= found.keys():
            continue
        try:
            built.append(cls(**found))
        except ValueError as error:
            problems += problems_of(error)
    raise_problems(dict.fromkeys(problems), where, kind=UsageError if words else McaError)
    return tuple(built)


def _is_empty(value: Typed) -> bool:
    return value in (None, [], "")


def _cast_all(
    cls: type, table: Mapping[str, tuple[TypeHint, bool]], values: Values, words: bool
) -> tuple[JsonObject, list[str]]:
    """The values of a class's fields, and what is wrong with the others."""
    found: JsonObject = {}
    problems = []
    refused = {f.name: f.metadata.get("refused", {}) for f in dataclasses.fields(cls)}
    for name in (name for name in table if name in values):
        try:
            found[name] = cast(name, values[name], table[name][0], words=words)
        except McaError as error:
            why = refused[name].get(str(values[name]))
            problems.append(f"{name} is {values[name]!r}; {why}" if why else str(error))
    return found, problems


def _init_fields(cls: type) -> dict[str, tuple[TypeHint, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        f.name: (
            hints.get(f.name, Any),
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
        if f.init
    }


def cast(name: str, value: Typed, hint: TypeHint, *, words: bool) -> Typed:
    """``value`` as the type that ``hint`` says, in the first of its alternatives that takes it.

    Args:
        name: What to call it in an error.
        value: A list becomes a tuple, and a whole number a float, where so declared.
        hint: The type.
        words: Text is read as a number, a switch or a member of an enumeration, and a single value as a list of it.

    Raises:
        McaError: No alternative takes it; a `UsageError` if it was words.
    """
    kind: type[McaError] = UsageError if words else McaError
    inner = None
    for alternative in alternatives(hint):
        try:
            return _as(alternative, value, name, words)
        except McaError as error:  # of an entry
            inner = error
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
    if inner and isinstance(value, list | tuple):
        raise inner
    bare = "; a flag without a value means true" if words and value is True else ""
    found = "a secret of another type" if is_secret(name) else f"{value!r:.80}"
    raise kind(f"{name} must be {describe(hint)}, not {found}{bare}")


def alternatives(hint: TypeHint) -> tuple[TypeHint, ...]:
    """The members of a union, those that take a value as it is before those that convert it.

    Text beside an enumeration is its members' names, not any text.
    """
    members = typing.get_args(hint) if origin_of(hint) in (Union, types.UnionType) else (hint,)
    if any(map(is_enum, members)):
        members = tuple(member for member in members if member is not str)
    order: dict[TypeHint, int] = {type(None): 0, bool: 1, dict: 2, list: 3, int: 4, float: 5}
    return tuple(sorted(members, key=lambda m: order.get(origin_of(m) or m, 6)))


def origin_of(hint: TypeHint) -> TypeHint:
    """The class or form that ``hint`` has members of: ``list`` of ``list[int]``; None: it has none."""
    return typing.get_origin(hint)


def is_enum(kind: TypeHint) -> bool:
    """Whether ``kind`` is a class of named values."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def _as(kind: TypeHint, value: Typed, name: str, words: bool) -> Typed:
    origin = origin_of(kind)
    if kind is Any:
        return value
    if kind in (None, type(None)):
        return _require(value is None, None)
    if origin is Literal:
        return _require(value in typing.get_args(kind), value)
    if kind in _READ:
        return (_READ if words else _EXACT)[kind](value)
    if (origin or kind) in (list, tuple):
        return (origin or kind)(_entries(kind, value, name, words))
    if (origin or kind) is dict:
        return _require(isinstance(value, dict), value)
    if is_enum(kind):
        return kind("no" if value is False or (words and _is_off(value)) else value)
    return value if words else _require(isinstance(value, origin or kind), value)


def _entries(kind: TypeHint, value: Typed, name: str, words: bool) -> list[Typed]:
    item = (typing.get_args(kind) or (Any,))[0]
    if words and not isinstance(value, list | tuple):
        value = [value]
    _require(isinstance(value, list | tuple), value)
    if words:
        _require(item is not str or not any(isinstance(entry, bool) for entry in value), value)
    return [cast(f"{name}, entry {place},", entry, item, words=words) for place, entry in enumerate(value)]


def _require(holds: bool, value: T) -> T:
    if not holds:
        raise ValueError(value)
    return value


def _is_number(value: Typed) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_bool(value: object) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return value if isinstance(value, bool) else words[str(value).lower()]


def _is_off(value: Typed) -> bool:
    """Whether a word is one that YAML 1.1 takes for false, as it does a bare ``no``."""
    return isinstance(value, str) and value.lower() in ("no", "off", "false")


def _read_int(value: Typed) -> int:
    number = float(_require(not isinstance(value, bool), value))
    return int(_require(number.is_integer(), number)) if not isinstance(value, int) else value


def _read_float(value: Typed) -> float:
    return float(_require(not isinstance(value, bool), value))


def _read_str(value: object) -> str:
    return str(_require(not isinstance(value, (dict, list)) and value is not None, value))


_READ: Mapping[TypeHint, Callable[[Typed], object]] = MappingProxyType(
    {
        bool: _read_bool,
        int: _read_int,
        float: _read_float,
        str: _read_str,
        Path: lambda value: Path(_read_str(value)),
    }
)
_EXACT: Mapping[TypeHint, Callable[[Typed], object]] = MappingProxyType(
    {
        bool: lambda value: _require(isinstance(value, bool), value),
        int: lambda value: _require(_is_number(value) and isinstance(value, int), value),
        float: lambda value: float(_require(_is_number(value), value)),
        str: lambda value: _require(isinstance(value, str), value),
    }
)
_NAMES: Mapping[TypeHint, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        Path: "a path",
        dict: "an object",
        tuple: "a list",
        list: "a list",
        None: "null",
        type(None): "null",
    }
)


def describe(hint: TypeHint) -> str:
    """``hint`` in a user's words, null last."""
    words: list[str] = []
    for member in sorted(alternatives(hint), key=lambda member: member in (None, type(None))):
        if origin_of(member) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(member))
        elif is_enum(member):
            words.extend(str(choice.value) for choice in member)
        else:
            words.append(_NAMES.get(origin_of(member) or member, str(member)))
    return " or ".join(dict.fromkeys(words))
