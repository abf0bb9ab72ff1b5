"""What ends the command from outside: Ctrl-C, SIGTERM, SIGHUP, and faults that no call reports.

What is left behind then is removed by those who write.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mca_config.errors import McaError

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(BaseException):
    """The command is to end because of a signal."""


class Interrupts:
    """The first signal that arrived, and what it does.

    While nothing is on disk, it ends the command wherever that is. While something is written (``holding``), it is only
    noted, and whoever writes asks with ``check``, so that no step is left half done: what was written is removed, or it
    is complete. Further signals do nothing.
    """

    def __init__(self) -> None:
        self.arrived: signal.Signals | None = None
        self.fault: McaError | None = None
        self._held = self._done = False
        self._last_line: str | None = None

    @contextmanager
    def listening(self, *, to_the_end: bool) -> Iterator[None]:
        """Takes the signals that are not ignored; ``to_the_end`` of the process, not of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in WORDS}
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, self._arrive)
        try:
            yield
        finally:
            self.finish()
            for number in taken:  # while it ends, Python puts the default back in the place of handlers
                signal.signal(number, signal.SIG_IGN if to_the_end else before[number])

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A block that writes; when it has ended without an error, a signal comes too late."""
        self._held = True
        try:
            self.check()
            yield
            self.finish()
        finally:
            self._held = False

    @contextmanager
    def ending_at_once(self, last_line: str) -> Iterator[None]:
        """A block in which nothing is half done here: a signal says ``last_line`` and ends the process.

        It does not wait for threads of the block, as those of an upload that has hours to go.
        """
        self._last_line = last_line
        try:
            yield
        finally:
            self._last_line = None

    def finish(self) -> None:
        """From now on signals come too late."""
        self._done = True

    def note(self, fault: "McaError") -> None:
        """Has ``check`` raise ``fault``, the first one."""
        self.fault = self.fault or fault

    def check(self) -> None:
        """Raise if a signal has arrived or a fault was noted."""
        if self.fault is not None:
            raise self.fault
        if self.arrived is not None and not self._done:
            raise Interrupted

    @property
    def code(self) -> int:
        """The exit code of a process that a signal ended, as shells give it; 0 if none did."""
        return 0 if self.arrived is None or self._done else 128 + self.arrived

    @property
    def word(self) -> str:
        """What the signal did to the command."""
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
