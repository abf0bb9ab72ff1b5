"""Construction of dataclasses from mappings: every key must be known, and every value must have its field's type.

JSON values have types and are used unchanged. Values of YAML and of a command line are converted from text: ``1e-4``
(text in YAML 1.1) becomes a number if the field is a number.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union

from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.printable import suggestion
from mca_config.redaction import is_secret
from mca_config.types import JsonObject, Typed, Values

T = TypeVar("T")
TypeHint = Any
"""The type of a field at run time: a class, a union, or a ``Literal``, for which Python has no common static type."""
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


def from_json(cls: type[T], values: Values, where: str) -> T:
    """Return an instance of dataclass ``cls`` from JSON ``values``; ``where`` names their file in errors.

    Raises:
        McaError: See `build`.
    """
    advice = "remove it, or read the file with the version of mca that wrote it"
    made = build(
        [cls], values, where=where, unknown=lambda key, _: f"unknown key {key}; {advice}", words=False
    )
    return typing.cast(T, made[0])


def to_json(instance: Any) -> JsonObject:
    """Return all fields of a dataclass instance, including defaults, without recursion into dicts."""
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
    """Return one instance of each of ``classes`` from ``values``; every key must be a field of one of them.

    Args:
        classes: Dataclasses; a key that several classes have is passed to all of them.
        values: Keys and values.
        where: Origin of the values for error messages: the file, or the file and the command line.
        unknown: Function that returns the message about an unknown key, from the key and all known keys.
        only: Names that need a value although a class has a default for them.
        words: The values come from YAML or a command line and may be text; errors are then `UsageError`.

    Raises:
        McaError: All unknown and missing keys, values of a wrong type, and errors of the classes themselves.
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
        arguments, wrong = _cast_all(cls, table, values, words)
        problems += wrong
        if wrong or not {name for name, (_, needed) in table.items() if needed} <= arguments.keys():
            continue
        try:
            built.append(cls(**arguments))
        except ValueError as error:
            problems += list_problems(error)
    raise_problems(dict.fromkeys(problems), where, kind=UsageError if words else McaError)
    return tuple(built)


def _is_empty(value: Typed) -> bool:
    return value in (None, [], "")


def _cast_all(
    cls: type, table: Mapping[str, tuple[TypeHint, bool]], values: Values, words: bool
) -> tuple[JsonObject, list[str]]:
    """Return the converted values of a class's fields, and the problems of values that cannot be converted."""
    arguments: JsonObject = {}
    problems = []
    refused = {f.name: f.metadata.get("refused", {}) for f in dataclasses.fields(cls)}
    expected = getattr(cls, "expected_values", {})
    for name in (name for name in table if name in values):
        try:
            arguments[name] = cast(name, values[name], table[name][0], words=words)
        except McaError as error:
            why = refused[name].get(str(values[name]))
            if not why and name in expected:
                why = f"expected {expected[name]}"
            problems.append(f"{name} is {values[name]!r}; {why}" if why else str(error))
    return arguments, problems


def _init_fields(cls: type) -> dict[str, tuple[TypeHint, bool]]:
    hints = type_hints(cls)
    return {
        f.name: (
            hints.get(f.name, Any),
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
        if f.init
    }


@cache
def type_hints(cls: type) -> Mapping[str, TypeHint]:
    """Return the types of the fields of a class and its bases, evaluated once, which takes 0.3 ms."""
    return MappingProxyType(typing.get_type_hints(cls))


def cast(name: str, value: Typed, hint: TypeHint, *, words: bool) -> Typed:
    """Convert ``value`` to the type ``hint``, or to the first member of a union that accepts it.

    Args:
        name: Name of the value in an error.
        value: A list becomes a tuple, and an integer a float, if the type says so.
        hint: The type.
        words: Text becomes a number, a bool or a member of an enumeration, and a single value a list.

    Raises:
        McaError: No member accepts the value; a `UsageError` with ``words``.
    """
    kind: type[McaError] = UsageError if words else McaError
    inner = None
    for alternative in alternatives(hint):
        try:
            return _as(alternative, value, name, words)
        except McaError as error:  # about an entry of a list
            inner = error
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
    if inner and isinstance(value, list | tuple):
        raise inner
    bare = "; a flag without a value means true" if words and value is True else ""
    shown = "null (no value)" if words and value is None else f"{value!r:.80}"
    if is_secret(name):
        shown = "a secret of another type"
    raise kind(f"{name} must be {describe(hint)}, not {shown}{bare}{_similar_choice(value, hint)}")


def _similar_choice(value: Typed, hint: TypeHint) -> str:
    """Return the end of an error that suggests the choice of ``hint`` most similar to a misspelled text."""
    choices: list[str] = []
    for member in alternatives(hint):
        if hint_origin(member) is Literal:
            choices += [choice for choice in typing.get_args(member) if isinstance(choice, str)]
        elif is_enum(member):
            choices += [str(choice.value) for choice in member]
    return suggestion(value, choices, "").removesuffix("; ") if choices and isinstance(value, str) else ""


@cache
def alternatives(hint: TypeHint) -> tuple[TypeHint, ...]:
    """Return the members of a union, those that accept a value unchanged before those that convert it.

    In a union of ``str`` and an enumeration, text must be the name of a member, so ``str`` is left out.
    """
    members = typing.get_args(hint) if hint_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(map(is_enum, members)):
        members = tuple(member for member in members if member is not str)
    order: dict[TypeHint, int] = {type(None): 0, bool: 1, dict: 2, list: 3, int: 4, float: 5}
    return tuple(sorted(members, key=lambda m: order.get(hint_origin(m) or m, 6)))


def hint_origin(hint: TypeHint) -> TypeHint:
    """Return the generic class or form of ``hint``: ``list`` of ``list[int]``; None: it is not generic."""
    return typing.get_origin(hint)


def is_enum(kind: TypeHint) -> bool:
    """Return whether ``kind`` is an ``Enum`` class."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def _as(kind: TypeHint, value: Typed, name: str, words: bool) -> Typed:
    origin = hint_origin(kind)
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
    return [cast(f"{name}, entry {index},", entry, item, words=words) for index, entry in enumerate(value)]


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
    """Return whether a word means false in YAML 1.1, such as a bare ``no``."""
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


def describe(hint: TypeHint) -> str:
    """Return ``hint`` in words for users, null last."""
    words: list[str] = []
    for member in sorted(alternatives(hint), key=lambda member: member in (None, type(None))):
        if hint_origin(member) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(member))
        elif is_enum(member):
            words.extend(str(choice.value) for choice in member)
        else:
            words.append(_NAMES.get(hint_origin(member) or member, str(member)))
    return " or ".join(dict.fromkeys(words))
