"""Tables of supported and unsupported families in the documentation, made from the catalog of families.

Run ``python -m mca_models.templates.page docs/families.md docs/reference/unsupported_types.md``; a test fails when that
is needed.
"""

from collections.abc import Iterable
from itertools import groupby

from mca_config.reference import Tables, update_files
from mca_models.templates.catalog import REFUSED, SUPPORTED


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
    update_files(TABLES)
