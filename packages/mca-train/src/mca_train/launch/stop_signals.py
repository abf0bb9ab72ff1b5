"""Signals that end a process before training listens for them: it leaves nothing behind, and says which one it was."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """A block in which these signals raise `Stopped`, unless they are ignored (``nohup``)."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    heard = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
