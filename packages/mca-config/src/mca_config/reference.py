"""The tables of arguments in the documentation, made from the dataclasses.

Run as ``python -m mca_config.reference docs/configuration.md``; a test says when that is due.
"""

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.arguments.options import DistributingOptions, TrainingOptions

LEVELS: tuple[tuple[type, type], ...] = (
    (DistributingParallelArguments, DistributingOptions),
    (MegatronArguments, TrainingOptions),
)
"""What users know, and the class that declares its options."""


def argument_table(cls: type) -> str:
    """A Markdown table of the arguments that ``cls`` itself declares."""
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


def updated(document: str) -> str:
    """``document`` with every table between the marks ``<!-- NAME -->`` and ``<!-- end NAME -->`` made anew."""
    for cls, options in LEVELS:
        begin, end = f"<!-- {cls.__name__} -->", f"<!-- end {cls.__name__} -->"
        table = f"{begin}\n{argument_table(options)}\n{end}"
        document = re.sub(f"{begin}.*?{end}", table.replace("\\", r"\\"), document, flags=re.DOTALL)
    return document


def main() -> None:
    """Updates the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
