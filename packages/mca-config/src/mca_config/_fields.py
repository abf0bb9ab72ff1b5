"""Plain dicts to dataclasses and back: every key known, every value of the declared type.

Whether values fit together is not looked at here. Text is never turned into numbers: JSON has types of its own.
"""

import dataclasses
import sys
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed, Values

T = TypeVar("T")


def from_mapping(cls: type[T], values: Values, where: str) -> T:
    """An instance of dataclass ``cls`` from JSON ``values``; ``where`` names them in errors."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise McaError(
            f"{where}: unknown key {', '.join(unknown)}; remove it, or read the file with the version of mca "
            "that wrote it"
        )
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise McaError(f"{where}: missing key {', '.join(missing)}")
    hints = get_type_hints(cls)
    return cls(**{name: coerce(value, hints[name], f"{where}: {name}") for name, value in values.items()})


def coerce(value: Typed, hint: Any, where: str) -> Typed:
    """``value`` as type ``hint``: lists become tuples and whole numbers floats where so declared."""
    for choice in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        matched, result = _match(value, choice, where)
        if matched:
            return result
    raise McaError(f"{where} must be {type_name(hint)}, not {value!r:.80}")


def _match(value: Typed, hint: Any, where: str) -> tuple[bool, Typed]:
    origin = get_origin(hint)
    if hint is Any:
        return True, value
    if hint is types.NoneType:
        return value is None, None
    if origin is Literal:
        return value in get_args(hint), value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            return False, None
        return True, origin(coerce(item, get_args(hint)[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return (True, float(value)) if abs(value) <= sys.float_info.max else (False, None)
    kind = origin or hint
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool)), value


def type_name(hint: Any) -> str:
    """``hint`` in a user's words."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(choice) for choice in get_args(hint))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    names: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        types.NoneType: "null",
        dict: "an object",
        tuple: "a list",
        list: "a list",
    }
    return names.get(origin or hint, str(hint))


def to_mapping(instance: Any) -> JsonObject:
    """The fields of a dataclass instance, those with default values included, not recursing into dicts."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
