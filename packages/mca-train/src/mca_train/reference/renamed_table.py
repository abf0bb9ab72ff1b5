"""The table of other programs' keys in the documentation, made from `RENAMED`.

Run as ``python -m mca_train.reference.renamed_table docs/moving.md``; a test says when that is due.
"""

import re
import sys
from pathlib import Path

from mca_train.config.renamed import RENAMED

_BEGIN, _END = "<!-- renamed -->", "<!-- end renamed -->"


def table() -> str:
    """Markdown; the keys that are called the same here stand in one row."""
    rows: dict[str, list[str]] = {}
    for key, told in RENAMED.items():
        words = told.split()
        rows.setdefault(f"`{words[2]}`" if told.startswith("is called ") else told, []).append(f"`{key}`")
    lines = [f"| {', '.join(keys)} | {told} |" for told, keys in rows.items()]
    return "\n".join(["| elsewhere | here |", "|---|---|", *lines])


def updated(document: str) -> str:
    """``document`` with the table made anew."""
    made = f"{_BEGIN}\n{table()}\n{_END}"
    return re.sub(f"{_BEGIN}.*?{_END}", lambda _: made, document, flags=re.DOTALL)


def main() -> None:
    """Updates the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
