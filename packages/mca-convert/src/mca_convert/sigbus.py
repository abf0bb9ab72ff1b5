"""Mapped source files that are cut off or cannot be read: an error that names them, not the end of the process.

A read of a page that is no longer there raises SIGBUS, which no Python handler can take. The one here gives the page
zeros, so that the read ends, and notes an error for whoever asks before the result is used.
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
def catching_truncated_files(tell: Callable[[McaError], None]) -> Iterator[None]:
    """A block in which ``tell`` hears of mapped files that cannot be read; what was read of them is zeros."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    before = _Action()
    given: set[int] = set()  # pages of zeros: another thread may have read there before they were

    def touched(number: int, info: int, _context: int) -> None:
        address = ctypes.c_uint64.from_address(info + _ADDRESS_OFFSET).value
        code = ctypes.c_int.from_address(info + _CODE_OFFSET).value
        page = address & -mmap.PAGESIZE
        file = _file_at(address) if code == _BUS_ADRERR else None
        if file is None:
            if page not in given:  # not ours: it comes again, to whoever was there
                libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        given.add(page)
        libc.mmap(page, mmap.PAGESIZE, mmap.PROT_READ, flags, -1, 0)
        tell(
            McaError(
                f"{file}: cannot be read to its end; was it changed while it was read, or is its disk broken?"
            )
        )

    handler = _Handler(touched)
    action = _Action(ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)


def _file_at(address: int) -> str | None:
    """The file that is mapped at ``address``."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        first, _, last = span.partition(b"-")
        if int(first, 16) <= address < int(last, 16):
            return os.fsdecode(name[0]) if name and name[0].startswith(b"/") else None
    return None
