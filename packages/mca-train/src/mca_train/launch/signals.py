"""Signals that end a process before training: they raise an exception, so that cleanup runs.

`mca_train.trainer.sigterm` handles SIGTERM during training.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise `Stopped` on these signals in the block, unless they are ignored (``nohup``)."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    handled = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
