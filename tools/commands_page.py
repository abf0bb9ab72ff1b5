"""Write what every command prints for ``--help`` into docs/keys.md. Run as ``uv run tools/commands_page.py``.

Flags that an earlier command or the table of the layout explains are named below the printed text.
"""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Mapping
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
    "mca-convert",
    "mca-convert plan",
    "mca-convert inspect",
    "mca-convert verify",
)
FLAG = re.compile(r"^  --(\w+).*\n(?: {8}.*\n)*", re.MULTILINE)
"""A flag with its meaning, in a help text."""


def page() -> str:
    """Return the page with what the commands of this environment print."""
    from mca_config.reference import update_document

    return update_document(PAGE.read_text(encoding="utf-8"), {"commands": _commands})


def _commands() -> str:
    printed: dict[str, str] = {}
    sections = []
    for name in COMMANDS:
        text = help_text(name)
        shown, notes = _without_repetition(text, printed)
        sections.append(f"### `{name}`\n\n```text\n{shown}```\n{notes}")
        for part in (*text.split("\n\n"), *(flag[0] for flag in FLAG.finditer(text))):
            printed.setdefault(part, f"`{name}`")
    return "\n" + "\n".join(sections)


def _without_repetition(text: str, printed: Mapping[str, str]) -> tuple[str, str]:
    """Return a help text without what earlier commands or the table of the layout explain, and notes that name it.

    Args:
        text: What a command prints.
        printed: By paragraph and by flag with its meaning, the command that printed it.
    """
    from mca_config.arguments.distributing import DistributingOptions

    meanings = {field.name: field.metadata["help"] for field in dataclasses.fields(DistributingOptions)}
    explained: dict[str, list[str]] = {}

    def omit(flag: "re.Match[str]") -> str:
        place = printed.get(flag[0], "")
        if not place and " ".join(flag[0].split()).endswith(f" {meanings.get(flag[1])}"):
            place = "[layout](#layout-and-computation)"
        if place:
            explained.setdefault(place, []).append(f"`--{flag[1]}`")
        return "" if place else flag[0]

    shown = [
        FLAG.sub(omit, f"{paragraph}\n")
        for paragraph in text.rstrip("\n").split("\n\n")
        if paragraph not in printed or FLAG.search(paragraph)
    ]
    shown = [paragraph for paragraph in shown if not re.fullmatch(r"\s*|[\w ]+:\n", paragraph)]
    notes = "".join(f"\nAlso {', '.join(flags)}: see {place}.\n" for place, flags in explained.items())
    return "\n".join(shown), notes


def help_text(name: str) -> str:
    """Return what the command ``name`` prints for ``--help``, in `COLUMNS` columns."""
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
