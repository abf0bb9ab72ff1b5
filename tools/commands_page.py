"""Writes docs/commands.md: what every command answers to ``--help``. Run as ``uv run tools/commands_page.py``."""

import contextlib
import io
import os
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
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
)
_HEAD = """# Commands

What each command answers to `--help`; `tools/commands_page.py` writes this page. The keys of the commands that train
stand in [Keys of a run](arguments.md) and [Configuration](configuration.md).
"""


def page() -> str:
    """The whole document, by running the commands of this environment."""
    return _HEAD + "".join(f"\n## `{name}`\n\n```text\n{_help(name)}```\n" for name in COMMANDS)


def _help(name: str) -> str:
    from mca_convert.cli import main as convert
    from mca_train.cli import main as train

    program, *words = name.split()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        (convert if program == "mca-convert" else train)([*words, "--help"])
    return said.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"  # how wide argparse writes
    PAGE.write_text(page(), encoding="utf-8")
