"""Fork the manager of the checkpoint writer's result queue instead of spawning it.

The first ``dist_checkpointing.save`` of a process makes a queue with the "spawn" method: the child imports the main
script again, which takes 10 s here and, if the script has no ``__main__`` guard, runs it twice. The forked manager
inherits the listening rendezvous socket and outlives ``os._exit``, so ``close()`` shuts it down at exit, and the
kernel if its parent is killed.

Each save gets a separate queue: Megatron's single queue mixes up the results of two concurrent background saves. A save
that this process waits for needs no manager. Megatron's writers are killed when the rank that forked them ends, also by
SIGKILL: otherwise they would wait forever and hold the rank's memory.
"""

import atexit
import ctypes
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import SyncManager

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream

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


_managers: dict[int, SyncManager] = {}
_without_manager = [False]


def _writer() -> Upstream:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    return filesystem_async


@contextmanager
def queues_without_manager() -> Iterator[None]:
    """Let saves in the block have queues that only this process can fill."""
    before, _without_manager[0] = _without_manager[0], True
    try:
        yield
    finally:
        _without_manager[0] = before


def _queue(*args: object, **kwargs: object) -> Upstream:
    """Return a new result queue; the first that other processes may fill forks this process's manager."""
    import torch.multiprocessing

    if _without_manager[0]:
        return queue.SimpleQueue()
    if os.getpid() not in _managers:
        manager = SyncManager(ctx=torch.multiprocessing.get_context("fork"))
        manager.start(initializer=end_with_parent, initargs=(os.getpid(),))
        _managers[os.getpid()] = manager
        atexit.register(close)
    return _managers[os.getpid()].Queue()


def close() -> None:
    """End this process's manager; the next save starts a new one."""
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
