"""Standard streams that may be closed, full, or without a reader, without effect on the command."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from mca_config.redaction import redacted
from mca_config.types import Typed


class SafeStream:
    """A text stream that drops text after a failed write.

    Args:
        stream: The underlying stream.
        name: Its name in the report of a failure on standard error; empty: failures are not reported.
        redacts: Remove secrets from the text.
    """

    def __init__(self, stream: TextIO, name: str = "", *, redacts: bool = False) -> None:
        self._stream, self._redacts = stream, redacts
        self._name = name
        self.failed = False
        """True if text was lost, except to a closed pipe."""

    def write(self, text: str) -> int:
        """Write ``text`` if possible."""
        try:
            self._stream.write(redacted(text) if self._redacts else text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed stream raises ValueError
            self._give_up(error)
        return len(text)

    def _give_up(self, error: Exception) -> None:
        """Redirect the stream and its buffer to ``/dev/null``."""
        null = _open_null()
        with suppress(OSError, ValueError):
            os.dup2(null.fileno(), self._stream.fileno())
        self._stream = null
        if isinstance(error, BrokenPipeError):
            return
        self.failed = True
        if self._name:
            reason = getattr(error, "strerror", None) or str(error)
            sys.stderr.write(f"{self._name} cannot be written ({reason}); its output is lost\n")

    def flush(self) -> None:
        """Do nothing, because every write flushes."""

    def __getattr__(self, name: str) -> Typed:
        return getattr(self._stream, name)


@contextmanager
def safe_streams(*, to_the_end: bool, output_too: bool = False) -> Iterator[None]:
    """Make standard error a `SafeStream`, and with ``output_too`` standard output too.

    They stay so for the block, or with ``to_the_end`` until the process ends. Standard error is redacted, output is
    not, because it may have texts of the user's data. A closed standard stream is opened as ``/dev/null``, because a
    checkpoint's file would otherwise get its number and receive text for the stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stdout or _open_null()
    safe: Typed = SafeStream(sys.stderr or _open_null(), redacts=True)
    sys.stderr = safe
    output = sys.stdout if output_too and isinstance(sys.stdout, io.TextIOWrapper) else None
    errors = output.errors if output else None
    if output_too:
        if output:
            output.reconfigure(errors="backslashreplace")
        safe = SafeStream(sys.stdout, "standard output")
        sys.stdout = safe
    try:
        yield
    finally:
        if not to_the_end:
            sys.stdout, sys.stderr = before
            if output:
                with suppress(OSError):  # from unwritten text
                    output.reconfigure(errors=errors)


def _open_null() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (open to the end)
