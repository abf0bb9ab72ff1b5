"""Signals that end the command: Ctrl-C, SIGTERM, SIGHUP.

The code that writes files removes incomplete ones.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(BaseException):
    """A signal that ends the command."""


class Interrupts:
    """The first signal and its handling.

    Usually a signal raises `Interrupted` at once. While files are written (``holding``) it is recorded and ``check``
    raises, so that the output is either removed or complete. Further signals have no effect.
    """

    def __init__(self) -> None:
        self.arrived: signal.Signals | None = None
        self._held = self._done = False
        self._last_line: str | None = None

    @contextmanager
    def listening(self, *, to_the_end: bool) -> Iterator[None]:
        """Handle the signals that are not ignored, with ``to_the_end`` until the process ends, else in the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in WORDS}
        handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._arrive)
        try:
            yield
        finally:
            self.finish()
            for number in handled:  # at its end, Python restores the default handlers
                signal.signal(number, signal.SIG_IGN if to_the_end else before[number])

    @contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        """Yield a function to call before files are written: from then on signals are recorded until the block ends.

        After a block that ends without an error they are ignored.
        """

        def hold() -> None:
            self._held = True

        try:
            yield hold
            self.finish()
        finally:
            self._held = False

    @contextmanager
    def ending_at_once(self, last_line: str) -> Iterator[None]:
        """Let a signal in the block print ``last_line`` and end the process at once.

        The process does not wait for threads of the block, such as those of a long upload.
        """
        self._last_line = last_line
        try:
            yield
        finally:
            self._last_line = None

    def finish(self) -> None:
        """Ignore signals from now on."""
        self._done = True

    def check(self) -> None:
        """Raise `Interrupted` after a signal."""
        if self.arrived is not None and not self._done:
            raise Interrupted

    @property
    def code(self) -> int:
        """Exit code of a process that a signal ended, 128 plus its number; 0 without a signal."""
        return 0 if self.arrived is None or self._done else 128 + self.arrived

    @property
    def word(self) -> str:
        """Participle for the last line, such as "interrupted"."""
        return "" if self.arrived is None else WORDS[self.arrived]

    def _arrive(self, number: int, frame: object) -> None:
        if self._last_line is not None:
            os.write(
                2, f"{WORDS[signal.Signals(number)]}; {self._last_line}\n".encode(errors="backslashreplace")
            )
            os._exit(128 + number)
        if self.arrived is None and not self._done:
            self.arrived = signal.Signals(number)
            if not self._held:
                raise Interrupted
