"""Renames that either replace nothing or exchange two directories in one step.

`atomic` decides what is renamed, and when.
"""

import ctypes
import errno
import os
from pathlib import Path

from mca_models.storage.partial_folder import CONTENT, DISPLACED, PartialFolder

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def exchange(folder: PartialFolder, old: Path) -> None:
    """Swap two directories in one step, so that ``old`` is complete at every moment."""
    try:
        _renameat2(CONTENT, os.fspath(old), folder.fd, _AT_FDCWD, _RENAME_EXCHANGE)
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


def move(name: str, fd: int, new_fd: int) -> None:
    """Move ``name`` from directory ``fd`` to ``new_fd``, without replacing an entry where the kernel supports that."""
    try:
        _renameat2(name, name, fd, new_fd, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.rename(name, name, src_dir_fd=fd, dst_dir_fd=new_fd)


def _renameat2(name: str, new: str, fd: int, new_fd: int, flags: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = -1 if function is None else function(fd, os.fsencode(name), new_fd, os.fsencode(new), flags)
    if code != 0:
        number = errno.ENOSYS if function is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
