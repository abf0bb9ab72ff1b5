"""Progress in bytes: a bar on a terminal, otherwise a line every few seconds."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mca_convert.tables import format_size

_SMALLEST_STEP = 16 << 20
_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def bar(nbytes: int, what: str, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show how many of ``nbytes`` are done, and yield a thread-safe function that adds to it.

    Args:
        nbytes: Total of the work.
        what: The work, such as ``converting``.
        quiet: Show nothing.
    """
    if quiet or sys.stderr is None:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        yield _Lines(nbytes, what).add
        return
    from tqdm import tqdm

    lock, pending = threading.Lock(), 0
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc=what, mininterval=0.2) as display:

        def add(count: int) -> None:
            nonlocal pending
            with lock:
                pending += count
                if pending >= _SMALLEST_STEP:
                    display.update(pending)
                    pending = 0

        yield add
        display.update(pending)


class _Lines:
    """Progress as a line every ten seconds."""

    def __init__(self, nbytes: int, what: str) -> None:
        self._nbytes, self._what, self._done = nbytes, what, 0
        self._lock, self._next = threading.Lock(), time.monotonic() + _SECONDS_BETWEEN_LINES

    def add(self, count: int) -> None:
        """Add ``count`` bytes."""
        with self._lock:
            self._done += count
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            share = self._done / max(self._nbytes, 1)
        sys.stderr.write(
            f"{self._what}: {format_size(self._done)} of {format_size(self._nbytes)} ({share:.0%})\n"
        )
