"""Write the tables of supported and unsupported families in the documentation from the catalog of families.

Run as ``uv run tools/families_page.py``.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from mca_config.reference import Tables, update_document
from mca_models.templates.catalog import REFUSED, SUPPORTED

_DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (_DOCS / "families.md", _DOCS / "reference" / "unsupported_types.md")


def supported_table() -> str:
    """Return the table of supported families; similar families share a line."""
    lines = ["| `model_type` | what sets it apart |", "|---|---|"]
    lines += [
        f"| {_names(kinds)} | {apart} |" for apart, kinds in groupby(SUPPORTED, key=SUPPORTED.__getitem__)
    ]
    return "\n".join(lines)


def refused_table() -> str:
    """Return the table of unsupported families, a line for each reason."""
    lines = ["| why | `model_type` |", "|---|---|"]
    lines += [
        f"| {reason} | {_names(kinds)} |" for reason, kinds in groupby(REFUSED, key=REFUSED.__getitem__)
    ]
    return "\n".join(lines)


TABLES: Tables = {"supported": supported_table, "not supported": refused_table}


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(update_document(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
