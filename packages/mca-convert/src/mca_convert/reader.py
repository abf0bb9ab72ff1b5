"""Source files: positioned reads, maps for strided reads, and checksums of what passed."""

import mmap
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError
from mca_convert.pool import run_all
from mca_models.checkpoint.checksum import crc32_join, crc32_of_file
from mca_models.checkpoint.writer import as_bytes

if TYPE_CHECKING:
    import numpy as np


_AT_ONCE = 1 << 20


class SourceFile:
    """One open source file; thread-safe.

    Args:
        path: The file.
        crc32: What its manifest says; None if nobody knows.
    """

    def __init__(self, path: Path, crc32: int | None = None) -> None:
        self.path, self.crc32 = path, crc32
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise McaError(f"{path}: cannot be read ({error.strerror})") from None
        self.nbytes = os.fstat(self._fd).st_size
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._passed: list[tuple[int, int, int]] = []

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fills ``buffer`` from byte ``offset`` on."""
        view = as_bytes(buffer)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise McaError(f"{self.path}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise McaError(
                    f"{self.path}: ended at byte {offset + done} while it was read; was it changed?"
                )
            done += count
        if self.crc32 is not None:
            part = (offset, len(view), zlib.crc32(view))
            with self._lock:
                self._passed.append(part)

    def bytes_map(self) -> "np.ndarray[Any, Any]":
        """The whole file as bytes, read when touched."""
        import numpy as np

        with self._lock:
            if self._map is None:
                self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8)

    def check(self) -> None:
        """Raises if the file's checksum is not the manifest's; reads again only what has not passed once."""
        if self.crc32 is None:
            return
        crc = self._crc_of_passed()
        if crc != self.crc32:
            raise McaError(
                f"{self.path}: its checksum is {crc:08x}, the manifest says {self.crc32:08x}; the file is damaged"
            )

    def _crc_of_passed(self) -> int:
        """The file's checksum: of the reads in their order, and of what lies between them."""
        crc = position = 0
        for offset, length, part in sorted(self._passed):
            if offset < position:
                return crc32_of_file(self.path)
            crc = crc32_join(self._crc_between(crc, position, offset), part, length)
            position = offset + length
        return self._crc_between(crc, position, self.nbytes)

    def _crc_between(self, crc: int, start: int, stop: int) -> int:
        """``crc`` continued by bytes ``start`` to ``stop`` (the header, padding, mapped tensors)."""
        for position in range(start, stop, _AT_ONCE):
            crc = zlib.crc32(os.pread(self._fd, min(_AT_ONCE, stop - position), position), crc)
        return crc

    def close(self) -> None:
        """Closes the file; its map lives on while arrays use it."""
        os.close(self._fd)


class SourceFiles:
    """All source files of a conversion, opened when first read."""

    def __init__(self, checksums: Mapping[Path, int]) -> None:
        self._checksums = checksums
        self._files: dict[Path, SourceFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> SourceFile:
        """The open file."""
        file = self._files.get(path)
        if file is None:
            with self._lock:
                file = self._files.get(path) or SourceFile(path, self._checksums.get(path))
                self._files[path] = file
        return file

    def check(self, workers: int) -> None:
        """Checks every file that has a checksum; what has not been read as it lies is read by ``workers`` threads.

        Raises:
            McaError: One is not what its manifest says.
        """
        files = [self.get(path) for path in self._checksums]
        run_all(files, workers, lambda: SourceFile.check)

    def close(self) -> None:
        """Closes all."""
        for file in self._files.values():
            file.close()
