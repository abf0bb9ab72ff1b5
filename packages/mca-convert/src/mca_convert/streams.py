"""Standard streams that may be closed, full, or read by nobody, without changing what the command does."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Forgiving:
    """A text stream; what cannot be written to it is lost.

    Args:
        stream: The one that is written to, until it fails.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes ``text`` if that is possible."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed one raises ValueError
            self._stream = _nowhere()
        return len(text)

    def flush(self) -> None:
        """Everything has been written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_streams(*, to_the_end: bool) -> Iterator[None]:
    """Has standard error take everything, ``to_the_end`` of the process or of the block.

    Where a standard stream is closed, ``/dev/null`` is opened in its place: a checkpoint's file would else get its
    number, and what is meant for the stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stdout or _nowhere()
    forgiving: Any = Forgiving(sys.stderr or _nowhere())
    sys.stderr = forgiving
    try:
        yield
    finally:
        if not to_the_end:
            sys.stdout, sys.stderr = before


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (open to the end)
