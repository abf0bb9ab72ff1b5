"""How much memory a piece of code needs."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most anonymous memory while the block runs, in bytes beyond what there was before; filled in at its end.

    The heap's free pages are given back first: a rank inherits those of the worker that forked it, and what the
    block then takes from them would not be seen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start, most, stop, found = anonymous(), 0, threading.Event(), []

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.append(max(most, anonymous()) - start)
