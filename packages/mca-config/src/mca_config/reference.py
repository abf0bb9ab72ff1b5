"""Generated tables in documents, and those of arguments, from the dataclasses.

A table is between ``<!-- NAME -->`` and ``<!-- end NAME -->``. Run ``python -m mca_config.reference docs/keys.md``; a
test of each table fails when its document must be regenerated.
"""

import dataclasses
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.arguments.distributing import DistributingOptions
from mca_config.arguments.megatron import TrainingOptions

LEVELS: tuple[tuple[type, type], ...] = (
    (DistributingParallelArguments, DistributingOptions),
    (MegatronArguments, TrainingOptions),
)
"""Public classes, and the classes that declare their options."""
Tables = Mapping[str, Callable[[], str]]
"""Generator of each table, by the name in its marks."""


def update_document(document: str, tables: Tables) -> str:
    """Return ``document`` with its ``tables`` regenerated."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        if begin in document:
            before, _, rest = document.partition(begin)
            document = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return document


def update_files(tables: Tables) -> None:
    """Regenerate ``tables`` in the files that the command line names."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(update_document(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


def cell(text: str) -> str:
    """Return ``text`` for a Markdown table, with bars, tags and asterisks escaped."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def argument_table(cls: type) -> str:
    """Return a Markdown table of the arguments that ``cls`` itself declares."""
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    lines = ["| argument | value | default | meaning |", "|---|---|---|---|"]
    for name in cls.__annotations__:
        default = fields[name].default
        shown = "" if default is None else f"`{str(default).lower()}`"
        text = cell(fields[name].metadata["help"])
        lines.append(f"| `{name}` | {_kind(hints[name])} | {shown} | {text} |")
    return "\n".join(lines)


def _kind(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = (_kind(choice) for choice in get_args(hint) if choice is not types.NoneType)
        return " or ".join(dict.fromkeys(kinds))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is list:
        return "list"
    names = {int: "integer", float: "number", bool: "true/false", str: "text"}
    return names.get(hint, "object")


TABLES: Tables = {cls.__name__: partial(argument_table, options) for cls, options in LEVELS}


if __name__ == "__main__":
    update_files(TABLES)
