"""Standard streams that may be closed, full, or read by nobody, without changing what the command does.

What is printed, and when, is not decided here.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from mca_config.redaction import redacted
from mca_config.types import Typed


class Forgiving:
    """A text stream; what cannot be written to it is lost.

    Args:
        stream: The one that is written to, until it fails.
        name: Its name when a failure is reported on standard error; without one it is not reported.
        redacts: Writes no secrets.
    """

    def __init__(self, stream: TextIO, name: str = "", *, redacts: bool = False) -> None:
        self._stream, self._redacts = stream, redacts
        self._name = name
        self.failed = False
        """Whether something was lost; what a reader that went away did not want is not."""

    def write(self, text: str) -> int:
        """Writes ``text`` if that is possible."""
        try:
            self._stream.write(redacted(text) if self._redacts else text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed one raises ValueError
            self._give_up(error)
        return len(text)

    def _give_up(self, error: Exception) -> None:
        """Sends what follows, and what is still in a buffer, nowhere."""
        nowhere = _nowhere()
        with suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream = nowhere
        if isinstance(error, BrokenPipeError):
            return
        self.failed = True
        if self._name:
            reason = getattr(error, "strerror", None) or str(error)
            sys.stderr.write(f"{self._name} cannot be written ({reason}); its output is lost\n")

    def flush(self) -> None:
        """Everything has been written."""

    def __getattr__(self, name: str) -> Typed:
        return getattr(self._stream, name)


@contextmanager
def safe_streams(*, to_the_end: bool, output_too: bool = False) -> Iterator[None]:
    """Has standard error take everything, ``to_the_end`` of the process or of the block; with ``output_too`` output.

    Standard error is redacted. Output is not: it may be texts of the user's data.

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
    forgiving: Typed = Forgiving(sys.stderr or _nowhere(), redacts=True)
    sys.stderr = forgiving
    output = sys.stdout if output_too and isinstance(sys.stdout, io.TextIOWrapper) else None
    errors = output.errors if output else None
    if output_too:
        if output:
            output.reconfigure(errors="backslashreplace")
        forgiving = Forgiving(sys.stdout, "standard output")
        sys.stdout = forgiving
    try:
        yield
    finally:
        if not to_the_end:
            sys.stdout, sys.stderr = before
            if output:
                with suppress(OSError):  # of what was not written yet
                    output.reconfigure(errors=errors)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (open to the end)
