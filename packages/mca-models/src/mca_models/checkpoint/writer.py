"""Writes one planned safetensors file, in any order, and sums it up as the bytes pass."""

import os
import threading
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError
from mca_models.checkpoint.checksum import crc32_join
from mca_models.checkpoint.manifest import FileRecord
from mca_models.checkpoint.safetensors import FilePlan, TensorInfo

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SafetensorsWriter:
    """An open file that is being filled; thread-safe.

    Use as a context manager. Leaving it without an error checks that every byte has been written, and
    syncs the file to disk; ``record`` then holds its size and checksum.
    """

    def __init__(self, plan: FilePlan) -> None:
        self.plan = plan
        self._parts: dict[str, list[tuple[int, int, int]]] = {name: [] for name in plan.tensors}
        self._lock = threading.Lock()
        self._crc32: int | None = None
        plan.file.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(plan.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            if plan.nbytes:
                os.posix_fallocate(self._fd, 0, plan.nbytes)  # a full disk is found before any work
            _pwrite_all(self._fd, plan.header, 0)
        except OSError as error:
            os.close(self._fd)
            raise McaError(f"{plan.file}: cannot be written ({error.strerror})") from None

    def write(self, name: str, data: "Buffer", start: int = 0) -> None:
        """Writes ``data`` (anything with contiguous bytes) at byte ``start`` of tensor ``name``."""
        view = memoryview(data).cast("B")
        info = self.plan.tensors[name]
        if start + len(view) > info.nbytes:
            raise McaError(
                f"{self.plan.file}: tensor {name!r} has {info.nbytes} bytes, got bytes {start} to "
                f"{start + len(view)}"
            )
        try:
            _pwrite_all(self._fd, view, info.offset + start)
        except OSError as error:
            raise McaError(f"{self.plan.file}: cannot be written ({error.strerror})") from None
        part = (start, len(view), zlib.crc32(view))
        with self._lock:
            self._parts[name].append(part)

    def close(self) -> None:
        """Checks completeness, computes the checksum, syncs and closes."""
        crc = zlib.crc32(self.plan.header)
        for name, info in sorted(self.plan.tensors.items(), key=lambda item: item[1].offset):
            for _, length, part in self._complete_parts(name, info):
                crc = crc32_join(crc, part, length)
        os.fsync(self._fd)
        os.close(self._fd)
        self._crc32 = crc

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the file, once it is closed."""
        if self._crc32 is None:
            raise ValueError(f"{self.plan.file} is not closed yet")
        return FileRecord(self.plan.nbytes, self._crc32)

    def _complete_parts(self, name: str, info: TensorInfo) -> Iterable[tuple[int, int, int]]:
        parts, position = sorted(self._parts[name]), 0
        for start, length, _ in parts:
            if start != position:
                break
            position += length
        if position != info.nbytes or sum(length for _, length, _ in parts) != info.nbytes:
            raise McaError(
                f"{self.plan.file}: tensor {name!r} was not written completely and once (bytes {position} "
                f"of {info.nbytes})"
            )
        return parts

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            os.close(self._fd)


def _pwrite_all(fd: int, data: "Buffer", position: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
