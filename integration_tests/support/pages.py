"""Code that pages of the documents show, and lines that they say are printed."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ON_TWO_RANKS = ("\n## Reinforcement learning\n", "\n## Python reference\n")
"""Headings of docs/python.md between which test_reinforcement_learning.py runs the examples, on two ranks."""
_UNITS = {"min", "ms", "us", "KB", "MB", "GB", "MiB", "GiB"}


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def split_at(text: str, start: str, end: str) -> tuple[str, str]:
    """Return the text between two headings, and the text before and after it; no ``end``: to the end of the page.

    Raises:
        ValueError: a heading is not in the text.
    """
    first = text.index(start)
    last = text.index(end, first) if end else len(text)
    return text[first:last], text[:first] + text[last:]


def printed_in(page: str, heading: str) -> str:
    """Return the printed lines (blocks of ``text``) in a section of a page in ``docs``."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "".join(shown for language, shown in BLOCK.findall(text) if language == "text")


def not_printed(shown: str, printed: str) -> list[str]:
    """Return the lines of ``shown`` with which no line of ``printed`` begins."""
    found = {_words(line) for line in printed.splitlines()}
    begun = {words[:count] for words in found for count in range(len(words) + 1)}
    return [line for line in shown.splitlines() if _words(line) not in begun]


def _words(line: str) -> tuple[str, ...]:
    """Return the words of a printed line that are the same in every run, without numbers and units."""
    return tuple(word for word in re.findall(r"[A-Za-z_]{2,}", line) if word not in _UNITS)
