"""Staging folders, in which a directory is written before it is put in place.

| path | contents |
|---|---|
| ``<name>.partial-<8 hex digits>`` | the folder, locked by its writer until the process ends or dies |
| ``.mca-partial`` in it | the marker: the writer's machine |
| ``new`` in it | the directory that is written |
| ``old`` in it | the directory that was replaced, where the file system cannot exchange two directories |

A later writer removes a folder with such a name if it has a marker and no living writer, or nothing in it.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MARKER = ".mca-partial"
CONTENT, DISPLACED = "new", "old"
_IDLE_SECONDS = 24 * 3600
"""Age at which a folder of another machine, whose locks may not be seen here, counts as abandoned."""


class StagingFolder:
    """A marked and locked folder.

    Args:
        parent: The directory that it is made in.
        name: Name of the directory that is written.

    Raises:
        OSError: It cannot be made; nothing is left of it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path, self.fd = parent / name, -1
        for is_last_try in (False, False, True):
            try:
                self._make(parent / f"{name}.partial-{os.urandom(4).hex()}")
                return
            except FileNotFoundError:  # another process took the empty folder for one that was left
                if is_last_try:
                    raise

    def _make(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _try_lock(self.fd)
            self._mark()
        except BaseException:
            self.remove()
            raise

    def _mark(self) -> None:
        fd = os.open(MARKER, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, json.dumps({"machine": _machine()}).encode())
            os.fsync(fd)
        finally:
            close(fd)
        os.fsync(self.fd)

    def is_in_place(self) -> bool:
        """Return whether the folder is still where it was made."""
        try:
            there, mine = self.path.lstat(), os.fstat(self.fd)
        except OSError:
            return False
        return os.path.samestat(there, mine)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        _remove(self.path)
        if self.fd >= 0:
            close(self.fd)
        self.fd = -1


def staging_folders(parent: Path, name: str) -> Iterator[Path]:
    """Yield the marked folders of ``name`` in ``parent``, of living and dead writers."""
    for path in _named_folders(parent, name):
        with suppress(OSError):
            if (path / MARKER).is_file() and not (path / MARKER).is_symlink():
                yield path


def _named_folders(parent: Path, name: str) -> list[Path]:
    """Return the folders in ``parent`` that have the name of a staging folder of ``name``."""
    pattern = re.compile(re.escape(name) + r"\.partial-[0-9a-f]{8}")
    try:
        named = sorted(path for path in parent.iterdir() if pattern.fullmatch(path.name))
        return [path for path in named if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def remove_leftovers(destination: Path, level: int = logging.INFO) -> None:
    """Remove what killed writers to ``destination`` left next to it or in it, and log it at ``level``."""
    for parent in (destination.parent, destination):
        for path in _named_folders(parent, destination.name):
            with suppress(OSError):
                path.rmdir()  # only if empty: its writer died before it was marked, or makes another folder
        for path in staging_folders(parent, destination.name):
            with suppress(OSError):
                _remove_if_abandoned(path, destination, level)


def stage_for_removal(directory: Path) -> StagingFolder:
    """Move ``directory`` into a new staging folder, in one step, and return the folder, to be removed."""
    folder = StagingFolder(directory.parent, directory.name)
    try:
        os.rename(directory, CONTENT, dst_dir_fd=folder.fd)
    except BaseException:
        folder.remove()
        raise
    return folder


def close(fd: int) -> None:
    """Close a descriptor whose data is on disk, or of no use: failing does no harm."""
    with suppress(OSError):
        os.close(fd)


def _remove_if_abandoned(folder: Path, destination: Path, level: int) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not _try_lock(fd):
            return  # its writer lives
        if not (_is_local(folder / MARKER) or _idle_seconds(folder) >= _IDLE_SECONDS):
            return
        logger.log(level, "removing %s, left by a process that died", folder)
        if (folder / DISPLACED).is_dir() and not destination.exists():
            (folder / DISPLACED).rename(destination)  # the writer died between the two steps of an exchange
        _remove(folder)
    finally:
        close(fd)


def _remove(folder: Path) -> None:
    """Remove a folder, the marker last; try twice."""
    for _ in range(2):
        with suppress(OSError):
            entries = [entry for entry in folder.iterdir() if entry.name != MARKER]
            for entry in entries:
                remove_entry(entry)
            if not any(os.path.lexists(entry) for entry in entries):
                (folder / MARKER).unlink(missing_ok=True)
                folder.rmdir()
                return


def remove_entry(path: Path) -> None:
    """Remove a file or a directory with all that is in it, as far as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _is_local(marker: Path) -> bool:
    """Return whether this machine wrote ``marker``, or it is empty, as its writer died at it."""
    try:
        text = marker.read_text()
        machines = zip(json.loads(text)["machine"], _machine(), strict=True) if text else ()
        return not text or any(theirs == mine != "" for theirs, mine in machines)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _idle_seconds(folder: Path) -> float:
    """Return the seconds since anything in ``folder`` changed."""
    newest = folder.stat().st_mtime
    for directory, _, files in os.walk(folder):
        for path in (Path(directory), *(Path(directory, name) for name in files)):
            with suppress(OSError):
                newest = max(newest, path.lstat().st_mtime)
    return time.time() - newest


def _machine() -> list[str]:
    """Return this machine's name, and the id of its boot, which its containers share."""
    with suppress(OSError):
        return [platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return [platform.node(), ""]


def _try_lock(fd: int) -> bool:
    """Return whether the lock on the directory was taken; also False where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
