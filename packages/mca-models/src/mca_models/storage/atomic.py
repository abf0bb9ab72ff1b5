"""Directories that are complete or absent.

A directory is written in a staging folder (``staging_folder``), synced, and put in place in one of three ways:

| destination | staging folder | put in place by |
|---|---|---|
| absent | next to it | a rename |
| an empty directory, such as a mount point | in it | moving the entries up; owner and mode are kept |
| a directory to overwrite | next to it | an exchange of both; the new one gets owner and mode of the old one |

Entries are moved in an order in which the file that readers look for comes last.
"""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mca_config.errors import DiskFull, McaError
from mca_config.files import write_error
from mca_config.printable import counted
from mca_models.storage.staging_folder import (
    CONTENT,
    DISPLACED,
    StagingFolder,
    close,
    remove_entry,
    remove_leftovers,
    staging_folders,
)

logger = logging.getLogger(__name__)

__all__ = [
    "AtomicDirectory",
    "atomic_directory",
    "remove_leftovers",
    "require_absent",
    "require_free",
    "staging_parent",
    "sync_directory",
    "write_file",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_MOVED_LAST = ("config.json", "adapter_config.json", "latest_checkpointed_iteration.txt", "mca_config.json")


class AtomicDirectory:
    """A directory being written. One process owns it; others may write files into ``path``.

    Args:
        destination: Path of the finished directory; a link to a directory stays one. Its parents are made.
        overwrite: A directory that exists now is replaced by ``publish``; else a non-empty one is an error.
        require_replaceable: Called before that; raises if what is there then must be kept.

    Raises:
        McaError: The destination is taken, or cannot be written; nothing is left.
    """

    def __init__(
        self,
        destination: Path,
        *,
        overwrite: bool = False,
        require_replaceable: Callable[[], None] = lambda: None,
    ) -> None:
        self.destination, self._overwrite = destination, overwrite
        self._require_replaceable = require_replaceable
        self._made_parents: list[Path] = []
        self._moved_entries: list[str] = []
        self._staging: StagingFolder | None = None
        self._content_fd = -1
        try:
            self._begin()
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise write_error(destination, error, advice="name another directory") from None
            raise

    def _begin(self) -> None:
        require_free(self.destination, overwrite=self._overwrite)
        self.destination = _resolved(self.destination)
        remove_leftovers(self.destination)
        parent = staging_parent(self.destination)
        self._fills_existing = parent == self.destination
        self._replaces = self._overwrite and self.destination.is_dir()
        self._make_parents(self.destination.parent)
        self._staging = StagingFolder(parent, self.destination.name)
        self.path = self._staging.path / CONTENT
        self.path.mkdir()
        self._content_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _make_parents(self, parent: Path) -> None:
        missing = []
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
                self._made_parents.append(folder)

    def publish(self, files: Mapping[str, int] | None = None) -> None:
        """Sync all directories and moves the whole into place. Files must already be synced.

        Args:
            files: What must be there: sizes by names relative to the directory.

        Raises:
            McaError: The directory was removed or changed meanwhile, or its place was taken; nothing is left.
        """
        try:
            folder = self._unchanged_staging(files or {})
            for _, _, _, fd in os.fwalk(".", dir_fd=self._content_fd):
                os.fsync(fd)
            if self._fills_existing:
                self._move_entries()
            else:
                self._rename(folder)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise McaError(f"{self.destination}: cannot be put in place ({error.strerror})") from None
            raise
        self._moved_entries = []  # they belong to a complete directory, which `discard` leaves
        self._sync_parents()
        self._made_parents = []
        self.discard()  # the empty staging folder, or the replaced directory in it

    @contextmanager
    def writing(self, needed: int | None = None) -> Iterator[Path]:
        """Yield ``path`` to write into and perhaps publish.

        An error removes everything, and names files as at the destination.

        Args:
            needed: Bytes of the whole directory, for the error of a full disk; None: not known.

        Raises:
            McaError: Something cannot be written.
        """
        try:
            yield self.path
        except BaseException as error:
            is_written = self._staging is None  # `publish` names the destination itself
            self.discard()
            if not is_written and (moved := self._error_at_destination(error, needed)) is not None:
                raise moved from error
            raise

    def _error_at_destination(self, error: BaseException, needed: int | None) -> McaError | None:
        """Return ``error`` with the names of files after `publish`; None: it names none."""
        if isinstance(error, OSError) and isinstance(error.filename, str):
            if Path(error.filename).is_relative_to(self.path):
                error = write_error(error.filename, error)
        if not isinstance(error, McaError):
            return None
        moved = error_at_destination(error, self.path, self.destination)
        if not isinstance(moved, DiskFull):
            return moved
        need = "" if needed is None else f"at least {counted(needed, 'byte')} are needed, "
        with suppress(OSError):
            there = next(each for each in (self.destination, *self.destination.parents) if each.is_dir())
            need += f"{counted(shutil.disk_usage(there).free, 'byte')} are free; "
        return DiskFull(f"{moved}; {need}nothing half-written is left; make room, or name another directory")

    def discard(self) -> None:
        """Remove everything written so far, and parents that were made for it. A second call does nothing."""
        for name in reversed(self._moved_entries):
            remove_entry(self.destination / name)
        if self._staging is not None:
            self._staging.remove()
        if self._content_fd >= 0:
            close(self._content_fd)
        for parent in reversed(self._made_parents):
            with suppress(OSError):
                parent.rmdir()
        self._staging, self._content_fd, self._made_parents, self._moved_entries = None, -1, [], []

    def _unchanged_staging(self, files: Mapping[str, int]) -> StagingFolder:
        """Return the folder, after checking that it is the one that was begun and holds ``files``."""
        if self._staging is None:
            raise ValueError(f"{self.destination} was published or discarded before")
        if not self._staging.is_in_place() or not _is_same(self.path, self._content_fd):
            raise McaError(
                f"{self.destination}: {self._staging.path} was removed or replaced while it was written; find "
                "out which program deletes files there, and convert again"
            )
        for name, nbytes in files.items():
            found = None
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self._content_fd, follow_symlinks=False).st_size
            if found != nbytes:
                state = "is gone" if found is None else f"has {found} bytes"
                raise McaError(
                    f"{self.path / name}: {state}, {nbytes} were written; find out which program writes there, "
                    "and convert again"
                )
        return self._staging

    def _rename(self, folder: StagingFolder) -> None:
        """Put the directory at a free path, or exchange it with the existing one."""
        if self._replaces and self.destination.is_dir():
            self._require_replaceable()
            _give_access(self._content_fd, self.destination.stat())
            exchange(folder, self.destination)
            return
        try:
            os.rename(CONTENT, self.destination, src_dir_fd=folder.fd)
        except OSError:
            require_absent(self.destination)  # another writer was faster
            raise

    def _move_entries(self) -> None:
        """Move the entries into the existing directory, the file that readers look for last."""
        target = os.open(self.destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(target, self.destination)
            require_absent(self.destination)
            for name in sorted((entry.name for entry in os.scandir(self._content_fd)), key=_order):
                os.rename(name, name, src_dir_fd=self._content_fd, dst_dir_fd=target)
                self._moved_entries.append(name)
            os.fsync(target)
        finally:
            close(target)

    def _sync_parents(self) -> None:
        """Sync the parent directories; log a warning if that fails."""
        try:
            for folder in {self.destination.parent, *(made.parent for made in self._made_parents)}:
                sync_directory(folder)
        except OSError as error:
            logger.warning(
                "%s: is complete, but %s could not be synced (%s): check that it still exists after a power failure",
                self.destination,
                self.destination.parent,
                error.strerror,
            )


@contextmanager
def atomic_directory(
    destination: Path, *, overwrite: bool = False, proceed: Callable[[Path], None] = lambda path: None
) -> Iterator[Path]:
    """A new directory that becomes ``destination`` once the block and ``proceed(directory)`` have passed."""
    partial = AtomicDirectory(destination, overwrite=overwrite)
    with partial.writing() as path:
        yield path
        proceed(path)
        partial.publish()


def error_at_destination(error: McaError, path: Path, destination: Path) -> McaError | None:
    """Return ``error`` with files of ``destination`` where it names those of ``path``; None: it names none."""
    if str(path) not in str(error):
        return None
    moved = type(error)(str(error).replace(str(path), str(destination)))
    if isinstance(error, DiskFull) and isinstance(moved, DiskFull):
        moved.room = error.room
    return moved


def require_absent(destination: Path) -> None:
    """Raise unless ``destination`` does not exist or is an empty directory (but for what writers left)."""
    if destination.is_dir():
        if _entry_of_others(destination) is not None:
            raise McaError(f"{destination}: exists and is not empty; remove it or name another directory")
    elif os.path.lexists(destination):
        raise McaError(f"{destination}: exists and is not a directory; name another one")


def require_free(destination: Path, *, overwrite: bool) -> None:
    """Raise if nothing can be put at ``destination``: it is taken, or to be replaced and cannot be."""
    if not overwrite:
        require_absent(destination)
    elif not destination.is_dir():
        require_absent(destination)
    elif _entry_of_others(destination) is not None and _is_mount(_resolved(destination)):
        raise McaError(
            f"{destination}: is a mount point, which cannot be replaced; empty it or name a directory in it"
        )


def staging_parent(destination: Path) -> Path:
    """Return the directory in which ``destination`` is staged: itself if it exists and is empty, else its parent."""
    resolved = _resolved(destination)
    return resolved if resolved.is_dir() and _entry_of_others(resolved) is None else resolved.parent


def sync_directory(path: Path) -> None:
    """Make the entries of ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def write_file(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> int:
    """Write a small file, in one or many blocks, and syncs it; returns its size.

    The permissions are ``mode`` but for the bits of the umask.

    Raises:
        McaError: It cannot be written, or the directory above its own is gone.
    """
    try:
        with suppress(FileExistsError):
            path.parent.mkdir()
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            written = sum(map(file.write, [data] if isinstance(data, bytes) else data))
            file.flush()
            os.fsync(fd)
    except OSError as error:
        raise write_error(path, error) from None
    return written


def _give_access(fd: int, like: os.stat_result) -> None:
    """Give the directory ``fd`` the owner, group and mode of ``like``, as far as this user and file system can."""
    for uid, gid in ((-1, like.st_gid), (like.st_uid, -1)):
        with suppress(OSError):
            os.fchown(fd, uid, gid)
    with suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(like.st_mode) | stat.S_IRWXU)


def _resolved(destination: Path) -> Path:
    """Return the absolute path; a final link to a directory is followed, links above it are kept."""
    return Path(os.path.realpath(destination) if destination.is_symlink() else os.path.abspath(destination))  # noqa: PTH100


def _entry_of_others(directory: Path) -> str | None:
    """Return an entry of ``directory`` that is not of a writer that died or still writes; None if there is none."""
    known = {folder.name for folder in staging_folders(directory, _resolved(directory).name)}
    known.add("lost+found")  # of a new file system
    return next((entry.name for entry in directory.iterdir() if entry.name not in known), None)


def _order(name: str) -> tuple[int, str]:
    return (_MOVED_LAST.index(name) if name in _MOVED_LAST else -1, name)


def _is_same(path: Path, fd: int) -> bool:
    """Return whether ``path`` is the directory that ``fd`` holds."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False


def _is_mount(path: Path) -> bool:
    """Return whether something is mounted at ``path``, also a directory of the same file system."""
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return any(line.split()[4] == _as_listed(path) for line in lines)
    return path.is_mount()


def _as_listed(path: Path) -> str:
    """``path`` as the kernel lists mount points."""
    escapes = {" ": "\\040", "\t": "\\011", "\n": "\\012", "\\": "\\134"}
    return "".join(escapes.get(c, c) for c in os.path.realpath(path))


def _lock(fd: int, directory: Path) -> None:
    """Lock ``directory`` for one writer at a time; without effect where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise McaError(f"{directory}: another program is writing there; name another directory") from None
    except OSError:
        return


def exchange(folder: StagingFolder, old: Path) -> None:
    """Swap two directories in one step, so that ``old`` is complete at every moment."""
    try:
        _exchange(folder.fd, old)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        # a file system without exchange: the old one steps aside first
        os.rename(old, DISPLACED, dst_dir_fd=folder.fd)
        try:
            os.rename(CONTENT, old, src_dir_fd=folder.fd)
        except OSError:
            os.rename(DISPLACED, old, src_dir_fd=folder.fd)
            raise


def _exchange(fd: int, old: Path) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = CONTENT.encode(), os.fsencode(old)
    code = -1 if function is None else function(fd, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if code != 0:
        number = errno.ENOSYS if function is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(old))
