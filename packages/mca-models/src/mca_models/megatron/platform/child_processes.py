"""Kill Megatron's checkpoint writers when the rank that forked them ends, also by SIGKILL.

Otherwise SIGKILL during a save leaves writers that wait forever and hold the rank's memory.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_parent = 0
_registered = False


@contextmanager
def kill_children_with_parent() -> Iterator[None]:
    """Kill processes forked in this block, and their children, when their parent ends."""
    global _parent, _registered
    if not _registered:
        os.register_at_fork(after_in_child=_follow)
        _registered = True
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before


def _follow() -> None:
    global _parent
    if _parent:
        end_with_parent(_parent)
        _parent = os.getpid()


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its ``parent`` ends; exit if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
