"""Directories that are complete or absent.

A directory is written beside its destination as ``<name>.partial-<random>``, synced, and renamed. The
writer holds a lock on the partial directory, which the kernel drops when the process dies in whatever
way; the next writer to the same destination removes what nobody holds.
"""

import ctypes
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mca_config.errors import McaError

logger = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class PartialDirectory:
    """A directory being written. One process owns it; others may write files into ``path``.

    Args:
        destination: Where it will stand. Its parents are made.
        overwrite: An existing directory is replaced by ``publish``; else a non-empty one is an error.
    """

    def __init__(self, destination: Path, *, overwrite: bool = False) -> None:
        self.destination = Path(os.path.abspath(destination))  # noqa: PTH100 (a link must stay a link)
        self.overwrite = overwrite
        if not overwrite:
            require_absent(destination)
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.destination)
            self.path = self.destination.with_name(f"{self.destination.name}.partial-{os.urandom(4).hex()}")
            self.path.mkdir()
        except OSError as error:
            raise McaError(f"{destination}: cannot be written ({error.strerror})") from None
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _try_lock(self._lock)

    def publish(self) -> None:
        """Syncs all directories and moves the whole into place. Files must already be synced."""
        for folder, _, _ in os.walk(self.path):
            sync_directory(Path(folder))
        if self.overwrite and self.destination.is_dir():
            _exchange(self.path, self.destination)
            shutil.rmtree(self.path)
        else:
            os.rename(self.path, self.destination)  # noqa: PTH104 (also over an empty directory)
        sync_directory(self.destination.parent)
        os.close(self._lock)

    def discard(self) -> None:
        """Removes everything written so far."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def atomic_directory(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A fresh directory that becomes ``destination`` if the block ends without an error."""
    partial = PartialDirectory(destination, overwrite=overwrite)
    try:
        yield partial.path
    except BaseException:
        partial.discard()
        raise
    partial.publish()


def require_absent(destination: Path) -> None:
    """Raises unless ``destination`` does not exist or is an empty directory."""
    if destination.is_dir():
        if any(destination.iterdir()):
            raise McaError(f"{destination}: exists and is not empty; remove it or name another directory")
    elif destination.exists() or destination.is_symlink():
        raise McaError(f"{destination}: exists and is not a directory; name another one")


def remove_leftovers(destination: Path) -> None:
    """Removes what killed writers to ``destination`` left beside it."""
    for leftover in destination.parent.glob(f"{_escape(destination.name)}.partial-*"):
        try:
            fd = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _try_lock(fd):
                logger.info("removing %s, left by a process that died", leftover)
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(fd)


def sync_directory(path: Path) -> None:
    """Makes the entries of ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file and syncs it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise McaError(f"{path}: cannot be written ({error.strerror})") from None


def _try_lock(fd: int) -> bool:
    """Whether nobody else holds the directory; False too where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _exchange(new: Path, old: Path) -> None:
    """Swaps two directories in one step, so that a complete one stands at ``old`` at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    if code == 0:
        return
    # a file system without exchange: the old one steps aside first
    aside = new.with_name(new.name + "-old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
