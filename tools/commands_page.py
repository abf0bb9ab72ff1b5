"""Write what every command prints for ``--help`` into docs/keys.md. Run as ``uv run tools/commands_page.py``."""

import contextlib
import io
import os
from pathlib import Path

COLUMNS = "92"
"""Width of the printed help, which the site shows without scrolling."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "keys.md"
COMMANDS = (
    "mca-train",
    "mca-train plan",
    "mca-train data",
    "mca-train tokenize",
    "mca-train report",
    "mca-train init",
    "mca-train schema",
    "mca-train completion",
    "mca-convert",
    "mca-convert plan",
    "mca-convert inspect",
    "mca-convert verify",
    "mca-convert completion",
)


def page() -> str:
    """Return the page with what the commands of this environment print."""
    from mca_config.reference import update_document

    return update_document(PAGE.read_text(encoding="utf-8"), {"commands": _commands})


def _commands() -> str:
    return "\n" + "\n".join(f"### `{name}`\n\n```text\n{_help(name)}```\n" for name in COMMANDS)


def _help(name: str) -> str:
    from mca_convert.cli import main as convert
    from mca_train.cli import main as train

    program, *words = name.split()
    said = io.StringIO()
    before = os.environ.get("COLUMNS", "")
    os.environ["COLUMNS"] = COLUMNS
    with contextlib.redirect_stdout(said):
        (convert if program == "mca-convert" else train)([*words, "--help"])
    os.environ["COLUMNS"] = before  # an empty value is no width
    return said.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
