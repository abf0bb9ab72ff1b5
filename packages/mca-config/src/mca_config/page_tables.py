"""Tables in documents that are made from code stand between ``<!-- NAME -->`` and ``<!-- end NAME -->``.

What a table says is made where its facts are. A test of each says when a document is to be made anew.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Tables = Mapping[str, Callable[[], str]]
"""What makes each table, by the name between its marks."""


def updated(document: str, tables: Tables) -> str:
    """``document`` with every one of ``tables`` that it has made anew."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        if begin in document:
            before, _, rest = document.partition(begin)
            document = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return document


def update_files(tables: Tables) -> None:
    """Makes ``tables`` anew in the files that the command line names."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(updated(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
