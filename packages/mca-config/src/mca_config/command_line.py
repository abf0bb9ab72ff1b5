"""The arguments' dataclasses as flags of argparse, with ``-`` or ``_``, for commands without transformers.

Values are checked where the dataclass is made, not here.
"""

import argparse
import dataclasses
import types
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mca_config.types import JsonObject

T = TypeVar("T")


def add_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, cls: type, names: Iterable[str] | None = None
) -> None:
    """Adds a flag for each field of ``cls`` (or for ``names`` of them) to a parser or argument group.

    Absent flags stay out of the namespace, so that the dataclass's own defaults hold.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in fields if names is None else names:
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        help_text = fields[name].metadata.get("help", "")
        parser.add_argument(
            *flags, dest=name, default=argparse.SUPPRESS, help=help_text, **_how_to_parse(hints[name])
        )


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """An instance of ``cls`` from the flags that were given."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _how_to_parse(hint: Any) -> JsonObject:
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = tuple(choice for choice in choices if choice is not types.NoneType)
    kind = str if str in choices else choices[0]
    if kind is bool:
        return {"type": _bool, "nargs": "?", "const": True, "metavar": "BOOL"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": "NAME"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def _bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes", "1"):
        return True
    if lowered in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
