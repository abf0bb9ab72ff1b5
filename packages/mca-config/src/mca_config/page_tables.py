"""Generated tables in documents, between ``<!-- NAME -->`` and ``<!-- end NAME -->``.

A test of each table fails when its document must be regenerated.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

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
