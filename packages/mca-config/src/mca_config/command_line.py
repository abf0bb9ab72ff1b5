"""Command-line flags from dataclasses of arguments, for commands without transformers.

The dataclass itself checks combinations of values.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from mca_config.fields import alternatives, hint_origin
from mca_config.parser import add_flag
from mca_config.types import JsonObject

T = TypeVar("T")


def add_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, cls: type, names: Iterable[str] | None = None
) -> None:
    """Add a flag for each field of ``cls`` (or for ``names`` of them) to a parser or argument group.

    Absent flags are not in the namespace, so that the dataclass's defaults apply. The metadata of a field may have its
    ``help`` and the placeholder of its ``value``; an empty ``value`` makes a flag without a value.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in fields if names is None else names:
        settings = _flag_settings(hints[name], fields[name].metadata.get("value"))
        add_flag(
            parser, name, default=argparse.SUPPRESS, help=fields[name].metadata.get("help", ""), **settings
        )


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Return an instance of ``cls`` from the flags on the command line."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _flag_settings(hint: Any, value: str | None) -> JsonObject:
    if value == "":
        return {"action": "store_true"}
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    kind = str if str in kinds else kinds[0]
    if kind is bool:
        return {"hint": kind, "nargs": "?", "const": True, "metavar": value or "BOOL"}
    if hint_origin(kind) is list:
        return {"hint": get_args(kind)[0], "nargs": "+", "metavar": value or "NAME"}
    if hint_origin(kind) is Literal:
        return {"hint": kind, "metavar": value or "{" + ",".join(map(str, get_args(kind))) + "}"}
    return {"hint": kind, "metavar": value or {int: "N", float: "X"}.get(kind, "TEXT")}
