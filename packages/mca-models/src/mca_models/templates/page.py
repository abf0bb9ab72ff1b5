"""The tables of `docs/families.md`, made from the catalog of families.

Run as ``python -m mca_models.templates.page docs/families.md``; a test says when that is due.
"""

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from mca_models.templates.catalog import REFUSED, SUPPORTED


def supported_table() -> str:
    """What is supported, a line for each family; families that are alike share one."""
    lines = ["| `model_type` | what sets it apart | layers |", "|---|---|---|"]
    for (apart, layers), kinds in groupby(SUPPORTED, key=SUPPORTED.__getitem__):
        lines.append(f"| {_names(kinds)} | {apart} | {layers} |")
    return "\n".join(lines)


def refused_table() -> str:
    """What is not supported, a line for each reason."""
    lines = ["| why | `model_type` |", "|---|---|"]
    lines += [
        f"| {reason} | {_names(kinds)} |" for reason, kinds in groupby(REFUSED, key=REFUSED.__getitem__)
    ]
    return "\n".join(lines)


def updated(document: str) -> str:
    """``document`` with both tables made anew, between ``<!-- supported -->`` and ``<!-- end supported -->``."""
    for name, table in (("supported", supported_table()), ("not supported", refused_table())):
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        text = f"{begin}\n{table}\n{end}".replace("\\", r"\\")
        document = re.sub(f"{begin}.*?{end}", text, document, flags=re.DOTALL)
    return document


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def main() -> None:
    """Updates the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
