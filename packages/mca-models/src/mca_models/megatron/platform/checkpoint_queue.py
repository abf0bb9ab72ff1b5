"""Result file of the checkpoint writer instead of a queue of a spawned manager.

The first ``dist_checkpointing.save`` of a process makes a queue with the "spawn" method: the child imports the main
script again, which takes 10 s here and, if the script has no ``__main__`` guard, runs it twice. A writer that is forked
can put its result into a file without a name, which needs no other process. A spawned worker (ms-swift's
``use_persistent_ckpt_worker``) opens this file by the number that it has in the rank's process.

Each save gets a separate file: Megatron's single queue mixes up the results of two concurrent background saves.
Megatron's writers are killed when the rank that forked them ends, also by SIGKILL: otherwise they would wait forever
and hold the rank's memory.
"""

import ctypes
import os
import pickle
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def _writer() -> Upstream:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    return filesystem_async


class _ResultFile:
    """Queue for one result of this process or of one that it starts: a fork, or Megatron's persistent worker."""

    def __init__(self, *_: object, **__: object) -> None:
        self._file = os.fdopen(os.memfd_create("mca-checkpoint-result"), "w+b")

    def __getstate__(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def __setstate__(self, path: str) -> None:
        self._file = Path(path).open("r+b")

    def put(self, result: object) -> None:
        self._file.write(pickle.dumps(result))
        self._file.flush()

    def get_nowait(self) -> object:
        self._file.seek(0)
        if not (data := self._file.read()):
            raise queue.Empty
        return pickle.loads(data)

    get = get_nowait


def _name() -> str:
    writer = _writer()
    public = "get_write_results_queue"
    return public if hasattr(writer, public) else f"_{public}"


def _needed() -> bool:
    import inspect

    source = inspect.getsource(getattr(_writer(), _name()))
    return "spawn" in source


def _apply() -> None:
    setattr(_writer(), _name(), _ResultFile)


PATCH = Patch(
    name="checkpoint-queue",
    why="the first checkpoint of a process spawns a child that imports the main script again (10 s)",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
