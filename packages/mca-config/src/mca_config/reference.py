"""Tables of arguments in the documentation, generated from the dataclasses.

Run ``python -m mca_config.reference docs/keys.md``; a test fails when that is needed.
"""

import dataclasses
import types
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mca_config import page_tables
from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.arguments.options import DistributingOptions
from mca_config.arguments.training_options import TrainingOptions

LEVELS: tuple[tuple[type, type], ...] = (
    (DistributingParallelArguments, DistributingOptions),
    (MegatronArguments, TrainingOptions),
)
"""Public classes, and the classes that declare their options."""


def argument_table(cls: type) -> str:
    """Return a Markdown table of the arguments that ``cls`` itself declares."""
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    lines = ["| argument | value | default | meaning |", "|---|---|---|---|"]
    for name in cls.__annotations__:
        default = fields[name].default
        shown = "" if default is None else f"`{str(default).lower()}`"
        text = fields[name].metadata["help"].replace("|", r"\|")
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
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, "object")


TABLES: page_tables.Tables = {cls.__name__: partial(argument_table, options) for cls, options in LEVELS}


if __name__ == "__main__":
    page_tables.update_files(TABLES)
