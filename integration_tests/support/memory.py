"""Measurement of the memory that code needs."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


class _Mallinfo(ctypes.Structure):
    """Result of glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def allocated() -> int:
    """Bytes that were asked of the allocator and not given back."""
    heap: _Mallinfo = _libc.mallinfo2()
    return int(heap.uordblks) + int(heap.hblkhd)


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory while the block runs, in bytes beyond what there was before; filled in at its end.

    It counts what is in use: both resident and allocated. Resident alone would hold what the allocator keeps of what
    was given back, up to 20 MiB by the holes of the heap that a rank inherits of the worker that forked it;
    allocated alone the read buffers of which only the beginning is touched.
    """
    gc.collect()
    _libc.malloc_trim(0)  # else pages that the block takes from there would not be seen
    before = anonymous(), allocated()
    most, stop, found = 0, threading.Event(), []

    def used() -> int:
        return min(anonymous() - before[0], allocated() - before[1])

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, used())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.append(max(most, used()))
