"""Megatron's checkpoint writer gets its result queue from a forked manager, not a spawned one.

The first ``dist_checkpointing.save`` of a process makes a queue with the "spawn" method: the child imports the
main script again, which takes 10 s here and, where the script has no ``__main__`` guard, runs it twice. The
forked manager inherits the listening rendezvous socket and outlives ``os._exit``, so it is shut down at exit
by ``close()``, and by the kernel if its parent is killed.

Each save gets a queue of its own: Megatron's one for all mixes up the results of two saves that are written in the
background at the same time.
"""

import atexit
import ctypes
import os
import signal
from multiprocessing.managers import SyncManager

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

_PR_SET_PDEATHSIG = 1
_managers: dict[int, SyncManager] = {}


def _writer() -> Upstream:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    return filesystem_async


def _queue(*args: object, **kwargs: object) -> Upstream:
    """A new result queue; this process's manager is forked at the first call."""
    import torch.multiprocessing

    if os.getpid() not in _managers:
        manager = SyncManager(ctx=torch.multiprocessing.get_context("fork"))
        manager.start(initializer=_die_with_parent, initargs=(os.getpid(),))
        _managers[os.getpid()] = manager
        atexit.register(close)
    return _managers[os.getpid()].Queue()


def _die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when its parent ends, however it ends; it may have ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def close() -> None:
    """Ends this process's manager; the next save starts a new one."""
    manager = _managers.pop(os.getpid(), None)
    if manager is not None:
        manager.shutdown()


def _name() -> str:
    writer = _writer()
    public = "get_write_results_queue"
    return public if hasattr(writer, public) else f"_{public}"


def _needed() -> bool:
    import inspect

    source = inspect.getsource(getattr(_writer(), _name()))
    return "spawn" in source


def _apply() -> None:
    setattr(_writer(), _name(), _queue)


PATCH = Patch(
    name="checkpoint-queue",
    why="the first checkpoint of a process spawns a child that imports the main script again (10 s)",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
