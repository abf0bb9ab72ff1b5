"""The arguments' dataclasses as flags of a command, for commands without transformers.

Whether values fit together is checked where the dataclass is made, not here.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from mca_config.fields import alternatives, origin_of
from mca_config.parser import add_flag
from mca_config.types import JsonObject

T = TypeVar("T")


def add_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, cls: type, names: Iterable[str] | None = None
) -> None:
    """Adds a flag for each field of ``cls`` (or for ``names`` of them) to a parser or argument group.

    Absent flags stay out of the namespace, so that the dataclass's own defaults hold. Metadata of a field may hold its
    ``help`` and what stands for its ``value``; an empty ``value`` makes a flag that takes none.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in fields if names is None else names:
        how = _how_to_read(hints[name], fields[name].metadata.get("value"))
        add_flag(parser, name, default=argparse.SUPPRESS, help=fields[name].metadata.get("help", ""), **how)


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """An instance of ``cls`` from the flags that were given."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _how_to_read(hint: Any, value: str | None) -> JsonObject:
    if value == "":
        return {"action": "store_true"}
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    kind = str if str in kinds else kinds[0]
    if kind is bool:
        return {"hint": kind, "nargs": "?", "const": True, "metavar": value or "BOOL"}
    if origin_of(kind) is list:
        return {"hint": get_args(kind)[0], "nargs": "+", "metavar": value or "NAME"}
    if origin_of(kind) is Literal:
        return {"hint": kind, "metavar": value or "{" + ",".join(map(str, get_args(kind))) + "}"}
    return {"hint": kind, "metavar": value or {int: "N", float: "X"}.get(kind, "TEXT")}
