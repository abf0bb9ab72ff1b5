"""Writes docs/commands.md: what every command answers to ``--help``. Run as ``uv run tools/commands_page.py``."""

import contextlib
import io
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
    "mca-convert completion",
)
_HEAD = """# Commands

This page shows what each command prints for `--help`; `tools/commands_page.py` writes it. The keys of the commands that
train are listed in [Keys](keys.md).

Both programs read words in the same way: flags are written with `-` or `_`, a misspelt command or flag is answered with
the one that was probably meant, wrong usage ends with exit code 2 and any other failure with 1, and `--version` prints
the version. `mca-train completion bash` and `mca-convert completion bash` (or `zsh`, `fish`) print scripts for your
shell.
"""


def page() -> str:
    """The whole document, by running the commands of this environment."""
    return _HEAD + "".join(f"\n## `{name}`\n\n```text\n{_help(name)}```\n" for name in COMMANDS)


def _help(name: str) -> str:
    from mca_convert.cli import main as convert
    from mca_train.cli import main as train

    program, *words = name.split()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        (convert if program == "mca-convert" else train)([*words, "--help"])
    return said.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
