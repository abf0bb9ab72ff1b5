"""Text formatting: `printable` makes a text with file or tensor names safe for a terminal, `counted` adds a plural."""

_LONGEST_LINE = 4000


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
