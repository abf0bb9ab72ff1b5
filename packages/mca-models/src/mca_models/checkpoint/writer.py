"""Writes one planned safetensors file, in any order, and sums it up as the bytes pass."""

import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mca_config.errors import McaError
from mca_models.checkpoint.checksum import crc32_join
from mca_models.checkpoint.manifest import FileRecord
from mca_models.checkpoint.safetensors import FilePlan, TensorInfo

_Part = tuple[int, int, int]  # start, length, checksum


def as_bytes(data: Any) -> memoryview:
    """The bytes of a contiguous buffer or NumPy array (those of ``ml_dtypes`` too)."""
    if hasattr(data, "dtype"):
        data = data.reshape(-1).view("u1")
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Has the kernel begin to write what it holds of a file, so that the sync at the end finds little to do."""
    if nbytes >= _WRITEBACK_BYTES and _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)  # a hint: failing does no harm


def _load_sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:  # only on Linux
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_SYNC_FILE_RANGE_WRITE = 2
_WRITEBACK_BYTES = 1 << 20
_sync_file_range = _load_sync_file_range()


class SafetensorsWriter:
    """An open file that is being filled; thread-safe.

    Use as a context manager. Leaving it without an error checks that every byte has been written, and
    syncs the file to disk; ``record`` then holds its size and checksum.

    Args:
        plan: The file; its directory is made, the file must not exist.
        checksum: Sum the bytes up; else ``record`` has checksum 0.
    """

    def __init__(self, plan: FilePlan, *, checksum: bool = True) -> None:
        self.plan = plan
        self._checksum = checksum
        self._parts: dict[str, list[_Part]] = {name: [] for name in plan.tensors}
        self._lock = threading.Lock()
        self._crc32: int | None = None
        plan.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fd = os.open(plan.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise McaError(f"{plan.file}: cannot be written ({error.strerror})") from None
        try:
            os.posix_fallocate(self._fd, 0, plan.nbytes)  # a full disk is found before any work
            self._put(plan.header, 0)
        except OSError as error:
            os.close(self._fd)
            raise McaError(f"{plan.file}: cannot be written ({error.strerror})") from None

    def write(self, name: str, data: Any, start: int = 0) -> None:
        """Writes ``data`` (anything with contiguous bytes) at byte ``start`` of tensor ``name``."""
        with self.stretch(name, start) as append:
            append(data)

    @contextmanager
    def stretch(self, name: str, start: int = 0) -> Iterator[Callable[[Any], None]]:
        """A function that appends data to tensor ``name``, from byte ``start`` on."""
        info = self.plan.tensors[name]
        position, crc = start, 0

        def append(data: Any) -> None:
            nonlocal position, crc
            view = as_bytes(data)
            if position + len(view) > info.nbytes:
                raise McaError(
                    f"{self.plan.file}: tensor {name} has {info.nbytes} bytes, got bytes {position} to "
                    f"{position + len(view)}"
                )
            if self._checksum:
                crc = zlib.crc32(view, crc)
            self._put(view, info.offset + position)
            position += len(view)

        yield append
        start_writeback(self._fd, info.offset + start, position - start)
        with self._lock:
            self._parts[name].append((start, position - start, crc))

    def _put(self, data: Any, position: int) -> None:
        view = memoryview(data)
        while len(view):
            try:
                written = os.pwrite(self._fd, view, position)
            except OSError as error:
                raise McaError(f"{self.plan.file}: cannot be written ({error.strerror})") from None
            view, position = view[written:], position + written

    def close(self) -> None:
        """Checks completeness, computes the checksum, syncs and closes. A second call does nothing."""
        if self._crc32 is not None:
            return
        crc = zlib.crc32(self.plan.header)
        for name, info in sorted(self.plan.tensors.items(), key=lambda item: item[1].offset):
            for _, length, part in self._complete_parts(name, info):
                crc = crc32_join(crc, part, length) if self._checksum else 0
        os.fsync(self._fd)
        os.close(self._fd)
        self._crc32 = crc

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the file, once it is closed."""
        if self._crc32 is None:
            raise ValueError(f"{self.plan.file} is not closed yet")
        return FileRecord(self.plan.nbytes, self._crc32)

    def _complete_parts(self, name: str, info: TensorInfo) -> list[_Part]:
        parts, position = sorted(part for part in self._parts[name] if part[1]), 0
        for start, length, _ in parts:
            if start != position:
                break
            position += length
        if position != info.nbytes or sum(length for _, length, _ in parts) != info.nbytes:
            raise McaError(
                f"{self.plan.file}: tensor {name} was not written completely and once (bytes {position} of "
                f"{info.nbytes})"
            )
        return parts

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *_: Any) -> None:
        if kind is None:
            self.close()
        elif self._crc32 is None:
            os.close(self._fd)
