"""A mapping of keys and values is checked against dataclasses here, and turned into them.

Values take the types of the fields they fill, so ``learning_rate: 1e-4`` (a string to YAML 1.1) is a number, and a
wrong value is named with its key and the type that was expected. Nothing here knows what a key is for.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union

from mca_config.errors import UsageError, problems_of, raise_problems
from mca_config.types import JsonObject, Typed, Values

T = TypeVar("T")
TypeHint = Any
"""The type of a field as it is found at run time: a class, a union, a ``Literal``; no type says which."""


def build(
    classes: Sequence[type],
    values: Values,
    *,
    where: str,
    only: Iterable[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Typed, ...]:
    """One instance of each of ``classes`` from ``values``; every key must be a field of one of them.

    Args:
        classes: Dataclasses; a key that several have goes to all of them.
        values: Keys and values of the YAML file and the command line together.
        where: What to name in an error: the file, or the file and the command line.
        only: Names that must have a value although some class has a default for them.
        elsewhere: What to say of keys that have no meaning here but have one elsewhere.

    Raises:
        UsageError: Unknown keys (each with the nearest known one), missing ones, values of a wrong type, and what
            the classes themselves refuse: all of it.
    """
    fields = [_init_fields(cls) for cls in classes]
    known = {name for table in fields for name in table}
    problems = [
        f"{key}: {elsewhere[key]}" if key in elsewhere else f"unknown key '{key}'{nearest(key, known)}"
        for key in values
        if key not in known
    ]
    required = {name for table in fields for name, (_, needed) in table.items() if needed} | set(only)
    if missing := sorted(name for name in required if values.get(name) in (None, [], "")):
        problems.append(f"missing {', '.join(missing)}")
    built = []
    for cls, table in zip(classes, fields, strict=True):
        found, unfit = _cast_all(table, values)
        problems += unfit
        if unfit or not {name for name, (_, needed) in table.items() if needed} <= found.keys():
            continue
        try:
            built.append(cls(**found))
        except ValueError as error:
            problems += problems_of(error)
    raise_problems(dict.fromkeys(problems), where, kind=UsageError)
    return tuple(built)


def _cast_all(table: Mapping[str, tuple[TypeHint, bool]], values: Values) -> tuple[JsonObject, list[str]]:
    """The values of a class's fields, and what is wrong with the others."""
    found: JsonObject = {}
    problems = []
    for name in table.keys() & values.keys():
        try:
            found[name] = cast(name, values[name], table[name][0])
        except UsageError as error:
            problems.append(str(error))
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


def nearest(word: str, known: Iterable[str], otherwise: str = "mca-train sft --help lists the keys") -> str:
    """The end of an error about an unknown ``word``: the known one that looks most like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; {otherwise}"


def cast(name: str, value: object, hint: TypeHint) -> Typed:
    """``value`` as the type that ``hint`` says, in the first of its alternatives that takes it.

    Raises:
        UsageError: None takes it.
    """
    for alternative in alternatives(hint):
        try:
            return _as(alternative, value)
        except (TypeError, ValueError, KeyError):
            continue
    raise UsageError(f"{name} is {value!r}; expected {_describe(hint)}")


def alternatives(hint: TypeHint) -> tuple[TypeHint, ...]:
    """The members of a union, those that take a value as it is before those that convert it.

    Text beside an enumeration is its members' names, not any text.
    """
    members = typing.get_args(hint) if origin_of(hint) in (Union, types.UnionType) else (hint,)
    if any(map(is_enum, members)):
        members = tuple(member for member in members if member is not str)
    order: dict[TypeHint, int] = {type(None): 0, bool: 1, dict: 2, list: 3, int: 4, float: 5}
    return tuple(sorted(members, key=lambda m: order.get(origin_of(m) or m, 6)))


def _as(kind: TypeHint, value: Typed) -> Typed:
    origin = origin_of(kind)
    if kind is Any:
        return value
    if kind in (None, type(None)):
        return _require(value is None, None)
    if origin is Literal:
        return _require(value in typing.get_args(kind), value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if (origin or kind) in (list, tuple):
        item = (typing.get_args(kind) or (Any,))[0]
        words = value if isinstance(value, (list, tuple)) else [value]
        _require(item is not str or not any(isinstance(word, bool) for word in words), value)
        return [cast("item", word, item) for word in words]
    if (origin or kind) is dict:
        return _require(isinstance(value, dict), value)
    if is_enum(kind):
        return kind("no" if value is False else value)  # to YAML 1.1 a bare no is false
    return value


def origin_of(hint: TypeHint) -> TypeHint:
    """The class or form that ``hint`` has members of: ``list`` of ``list[int]``; None: it has none."""
    return typing.get_origin(hint)


def is_enum(kind: TypeHint) -> bool:
    """Whether ``kind`` is a class of named values."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def _require(holds: bool, value: T) -> T:
    if not holds:
        raise ValueError(value)
    return value


def _bool(value: object) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return value if isinstance(value, bool) else words[str(value).lower()]


def _int(value: Typed) -> int:
    number = float(_require(not isinstance(value, bool), value))
    return int(_require(number.is_integer(), number)) if not isinstance(value, int) else value


def _float(value: Typed) -> float:
    return float(_require(not isinstance(value, bool), value))


def _str(value: object) -> str:
    return str(_require(not isinstance(value, (dict, list)) and value is not None, value))


_SCALARS: Mapping[TypeHint, Callable[[Typed], object]] = {bool: _bool, int: _int, float: _float, str: _str}


def _describe(hint: TypeHint) -> str:
    names: dict[TypeHint, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
    }
    words = []
    for member in alternatives(hint):
        if member in (None, type(None)):
            words.append("null")
        elif origin_of(member) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(member))
        elif is_enum(member):
            words.extend(str(choice.value) for choice in member)
        else:
            words.append(names.get(origin_of(member) or member, str(member)))
    return " or ".join(dict.fromkeys(words))
