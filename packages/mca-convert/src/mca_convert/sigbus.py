"""SIGBUS handler for memory-mapped source files that are truncated or unreadable.

A read of a missing page raises SIGBUS, which no Python handler can handle. This handler maps a page of zeros, so that
the read returns, and records an error, which is checked before the result is used.
"""

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mca_config.errors import McaError

_SA_SIGINFO = 4
_BUS_ADRERR = 2
_MAP_FIXED = 0x10
_ADDRESS_OFFSET, _CODE_OFFSET = 16, 8  # in siginfo_t, of 64-bit Linux
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """``struct sigaction`` of 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def catching_truncated_files(report: Callable[[McaError], None]) -> Iterator[None]:
    """Call ``report`` for mapped files that cannot be read in the block; such reads return zeros."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    before = _Action()
    zero_pages: set[int] = set()  # another thread may have read one before it was mapped

    def handle_fault(number: int, info: int, _context: int) -> None:
        address = ctypes.c_uint64.from_address(info + _ADDRESS_OFFSET).value
        code = ctypes.c_int.from_address(info + _CODE_OFFSET).value
        page = address & -mmap.PAGESIZE
        file = _file_at(address) if code == _BUS_ADRERR else None
        if file is None:
            if page not in zero_pages:  # of other code: restore its handler, which gets the repeated signal
                libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        zero_pages.add(page)
        libc.mmap(page, mmap.PAGESIZE, mmap.PROT_READ, flags, -1, 0)
        report(
            McaError(
                f"{file}: cannot be read to its end; was it changed while it was read, or is its disk broken?"
            )
        )

    handler = _Handler(handle_fault)
    action = _Action(ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)


def _file_at(address: int) -> str | None:
    """Return the file that is mapped at ``address``."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        first, _, last = span.partition(b"-")
        if int(first, 16) <= address < int(last, 16):
            return os.fsdecode(name[0]) if name and name[0].startswith(b"/") else None
    return None
