"""Output of the commands: lines that are safe for a terminal, JSON, tables, sizes and progress."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from mca_config.errors import McaError
from mca_config.printable import printable
from mca_config.redaction import redacted, redacted_values
from mca_config.types import Values
from mca_convert.pool import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

JSON_VERSION = 1
_SMALLEST_STEP = 16 << 20
_SECONDS_BETWEEN_LINES = 10.0


def write_line(text: str) -> None:
    """Print ``text`` and a new line; a closed pipe or a missing standard output is not an error.

    Raises:
        McaError: The text cannot be written, for example on a full disk.
    """
    _write(printable(redacted(text)))


def _write(text: str) -> None:
    stream = sys.stdout
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _redirect_to_null(stream.fileno())
    except OSError as error:
        _redirect_to_null(stream.fileno())
        raise McaError(f"standard output: cannot be written ({error.strerror})") from None


def _redirect_to_null(fd: int) -> None:
    """Redirect ``fd`` to ``/dev/null``, so that the end of the process does not retry the write."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def write_json(kind: str, document: Values) -> None:
    """Print ``document`` as JSON with a schema name for its ``kind`` and a version."""
    values = redacted_values({"schema": f"mca-convert/{kind}", "version": JSON_VERSION, **document})
    _write(json.dumps(values, indent=1))


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


@contextmanager
def progress_bar(what: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show progress in bytes: a bar on a terminal, otherwise a line every few seconds.

    Args:
        what: The work, such as ``converting``.
        quiet: Show nothing.
    """
    if quiet or sys.stderr is None:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        bar = _Bar(what)
        try:
            yield bar.show
        finally:
            bar.close()
    else:
        yield _Lines(what).show


class _Bar:
    """Progress as a bar, which appears with the first call."""

    def __init__(self, what: str) -> None:
        self._what, self._done = what, 0
        self._bar: tqdm[NoReturn] | None = None

    def show(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes."""
        from tqdm import tqdm

        if self._bar is None and total:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=self._what, mininterval=0.2)
        self._done = done
        if self._bar is not None and done - self._bar.n >= _SMALLEST_STEP:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar on the terminal, with all that was done."""
        if self._bar is not None:
            self._bar.update(self._done - self._bar.n)
            self._bar.close()


class _Lines:
    """Progress as a line every ten seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + _SECONDS_BETWEEN_LINES

    def show(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes, unless the last line is recent."""
        if not done or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
        share = done / max(total, 1)
        sys.stderr.write(f"{self._what}: {format_size(done)} of {format_size(total)} ({share:.0%})\n")
