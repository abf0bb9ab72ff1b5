"""Text of messages: `printable` makes names safe for a terminal, `counted` adds a plural, `suggestion` a near name.

`terminal_width`, `first_line` and `fit_choices` are for help.
"""

import os
import re
import sys
from collections.abc import Iterable

_LONGEST_LINE = 4000
_EVALUATION = "eval"
_WIDEST = 120
INDENT = 8
"""Columns before the meaning of a flag in a help."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped and very long lines shortened."""
    return "\n".join(_line(line) for line in text.split("\n"))


def _line(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-200:]}"
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()


def terminal_width() -> int:
    """Return the columns of a help: those of the terminal, at most 120, or 120 where there is none."""
    columns = os.environ.get("COLUMNS", "")
    try:  # not shutil's function: the import takes 5 ms
        width = int(columns) if columns.isdigit() else os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, ValueError, OSError):  # no terminal
        width = 0
    return min(width or _WIDEST, _WIDEST)


def first_line(text: str, ending: str = "") -> str:
    """Return the leading sentences of ``text`` that fit in one line of a help of 120 columns, before ``ending``.

    A first sentence that does not fit is cut with an ellipsis. The documents have the whole text.
    """
    room = _WIDEST - INDENT - len(ending)
    line, *others = re.split(r"(?<=[.?!]) (?=[A-Z0-9`])", text)
    for other in others:
        if len(f"{line} {other}") > room:
            break
        line = f"{line} {other}"
    return (line if len(line) <= room else f"{line[: room - 4].rpartition(' ')[0]} ...") + ending


def fit_choices(placeholder: str, column: int) -> str:
    """Return a placeholder such as ``{a,b,c}``, without the last choices if it does not fit in a help from ``column``.

    The error about a wrong value lists all choices.
    """
    room = _WIDEST - column
    return placeholder if len(placeholder) <= room else f"{placeholder[: room - 4].rpartition(',')[0]},...}}"


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of an error about an unknown ``word``.

    If the word lacks one part of an option, an evaluation option is suggested only if no other option fits.

    Args:
        word: The unknown word.
        known: The known words; a flag is shown unchanged, any other word in quotes.
        otherwise: Text if no known word is similar.
    """
    from difflib import get_close_matches  # not needed for a command's help

    name, originals = word.lstrip("-"), {option.lstrip("-"): option for option in known}
    close = get_close_matches(name, originals, n=1, cutoff=0.6)
    if not close:
        return f"; {otherwise}"
    if _has_one_more_word(close[0], name, _EVALUATION):
        close = [option for option in originals if _has_one_more_word(option, name)]
        close.sort(key=lambda option: _EVALUATION in option)  # stable
    similar = originals[close[0]]
    return f"; did you mean {similar if similar.startswith('-') else repr(similar)}?"


def _has_one_more_word(name: str, shorter: str, more: str | None = None) -> bool:
    """Return whether ``name`` is ``shorter`` with one more word, which is ``more`` if that is set."""
    longer, words = (text.replace("-", "_").split("_") for text in (name, shorter))
    return any(
        words == longer[:i] + longer[i + 1 :] and more in (None, word) for i, word in enumerate(longer)
    )
