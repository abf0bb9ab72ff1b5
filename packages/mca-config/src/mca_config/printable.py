"""`printable` makes a text safe for a terminal, whatever file name or tensor name is quoted in it; `counted` counts."""

_LONGEST_LINE = 4000


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """``text`` without control characters, which a terminal would obey, and with very long lines cut."""
    return "\n".join(_line(line) for line in text.split("\n"))


def _line(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-200:]}"
    return line if line.isprintable() else "".join(map(_escaped, line))


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
