"""Plain-text tables and sizes for terminals."""

from collections.abc import Iterator, Sequence


def format_size(nbytes: int) -> str:
    """Return a number of bytes with a suitable unit."""
    value = float(nbytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with words aligned to the left and numbers to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        yield "  ".join(cells).rstrip()
