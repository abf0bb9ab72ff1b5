"""The folder that a checkpoint is written in before it is published, known as our own by a marker in it.

``<name>.partial-<8 hex digits>/.mca-partial`` says which machine began it and, while its entries are moved into an
existing directory, which ones. The writer holds a lock on the folder, which the kernel drops when the process dies in
any way. Only a folder with such a name, the marker and no living writer is ever removed, or one with such a name
and nothing in it.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MARKER = ".mca-partial"
_BEGUN = f"{MARKER}.new"
"""The marker while it is written: a writer that is killed then leaves nothing else."""
CONTENT, DISPLACED = "new", "old"
_IDLE_SECONDS = 24 * 3600  # of a folder begun on another machine, whose locks may not be seen here


class PartialFolder:
    """A marked and locked folder.

    Args:
        place: The directory that it is made in.
        name: What it begins with.

    Raises:
        OSError: It cannot be made; nothing is left of it.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.path, self.fd = place / name, -1
        for last in (False, False, True):
            try:
                self._begin(place / f"{name}.partial-{os.urandom(4).hex()}")
                return
            except FileNotFoundError:  # another process took the empty folder for one that was left
                if last:
                    raise

    def _begin(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _try_lock(self.fd)
            self.mark({})
        except BaseException:
            self.remove()
            raise

    def mark(self, moved: Mapping[str, int]) -> None:
        """Write the marker; ``moved`` are the inode numbers of entries that are about to leave, by name."""
        text = json.dumps({"machine": _machine(), "moved": dict(moved)}).encode()
        fd = os.open(_BEGUN, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, text)
            os.fsync(fd)
        finally:
            close(fd)
        os.rename(_BEGUN, MARKER, src_dir_fd=self.fd, dst_dir_fd=self.fd)
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


def leftovers(place: Path, name: str) -> Iterator[Path]:
    """The marked folders of ``name`` in ``place``, of living and dead writers."""
    for path in _folders(place, name):
        with suppress(OSError):
            names = [entry.name for entry in path.iterdir()]
            marker = path / (_BEGUN if names == [_BEGUN] else MARKER)
            if marker.is_file() and not marker.is_symlink():
                yield path


def _folders(place: Path, name: str) -> list[Path]:
    """Return the folders in ``place`` that are named as writers of ``name`` name them."""
    own = re.compile(re.escape(name) + r"\.partial-[0-9a-f]{8}")
    try:
        named = sorted(path for path in place.iterdir() if own.fullmatch(path.name))
        return [path for path in named if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def remove_leftovers(destination: Path) -> None:
    """Remove what killed writers to ``destination`` left next to it or in it."""
    for place in (destination.parent, destination):
        for path in _folders(place, destination.name):
            with suppress(OSError):
                path.rmdir()  # an empty one, whose writer died before it had marked it, or makes another
        for path in leftovers(place, destination.name):
            with suppress(OSError):
                _remove_if_dead(path, destination)


def moved_names(folder: Path) -> set[str]:
    """Return the entries that a stopped writer had moved from its ``folder`` into an existing directory."""
    _, moved = _read_marker(folder)
    with suppress(OSError):
        if any((folder / CONTENT).iterdir()):
            return {name for name, inode in moved.items() if _inode(folder.parent / name) == inode}
    return set()


def retire(directory: Path) -> PartialFolder:
    """A partial folder with ``directory`` in it, gone from its place in one step; to be removed."""
    folder = PartialFolder(directory.parent, directory.name)
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


def _remove_if_dead(folder: Path, destination: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        here, _ = _read_marker(folder)
        begun = not (folder / MARKER).exists()  # it holds no more than a marker that may be incomplete
        if not _try_lock(fd) or not (here or begun or _idle_seconds(folder) >= _IDLE_SECONDS):
            return
        logger.info("removing %s, left by a process that died", folder)
        if (folder / DISPLACED).is_dir() and not destination.exists():
            (folder / DISPLACED).rename(destination)  # it died between the two steps of an exchange
        for name in moved_names(folder):
            remove_entry(folder.parent / name)
        _remove(folder)
    finally:
        close(fd)


def _remove(folder: Path) -> None:
    """Remove a folder, the marker last; once more where something failed."""
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


def _read_marker(folder: Path) -> tuple[bool, dict[str, int]]:
    """Return whether this machine wrote it, and what was being moved."""
    try:
        marker = folder / MARKER
        document = json.loads((marker if marker.exists() else folder / _BEGUN).read_text())
        here = any(theirs == mine != "" for theirs, mine in zip(document["machine"], _machine(), strict=True))
        return here, {str(name): int(inode) for name, inode in document["moved"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False, {}


def _idle_seconds(folder: Path) -> float:
    """Return the seconds since anything in ``folder`` changed."""
    newest = folder.stat().st_mtime
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            with suppress(OSError):
                newest = max(newest, path.lstat().st_mtime)
    return time.time() - newest


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.lstat().st_ino
    return None


def _machine() -> list[str]:
    """The name of this machine, and of its kernel since it was started, which its containers share."""
    with suppress(OSError):
        return [platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return [platform.node(), ""]


def _try_lock(fd: int) -> bool:
    """Return whether the lock on the directory was taken; False too where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
