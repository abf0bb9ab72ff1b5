"""Source files: positioned reads, maps for strided reads, and checksums of what passed.

What the bytes mean is known to `mca_models.storage`.
"""

import mmap
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.files import naming_read_errors, open_regular
from mca_convert.pool import run_all
from mca_models.storage.checksum import crc32_join, file_crc32
from mca_models.storage.partial_folder import close
from mca_models.storage.writer import as_bytes
from mca_models.weights.arrays import Contiguous, NumpyArray

if TYPE_CHECKING:
    pass


_AT_ONCE = 1 << 20


class SourceFile:
    """One open source file; thread-safe.

    Args:
        path: The file.
        crc32: What its manifest says; None if nobody knows.
    """

    def __init__(self, path: Path, crc32: int | None = None) -> None:
        self.path, self.crc32 = path, crc32
        with naming_read_errors(path):
            self._fd = open_regular(path)
            self.nbytes = os.fstat(self._fd).st_size
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._passed: list[tuple[int, int, int]] = []

    def read_into(self, buffer: Contiguous, offset: int) -> None:
        """Fills ``buffer`` from byte ``offset`` on."""
        view = as_bytes(buffer)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise McaError(f"{self.path}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise self._truncated_error(offset + done)
            done += count
        if self.crc32 is not None:
            part = (offset, len(view), zlib.crc32(view))
            with self._lock:
                self._passed.append(part)

    def mapped(self, offset: int, nbytes: int) -> NumpyArray:
        """``nbytes`` from byte ``offset`` on, read when touched."""
        import numpy as np

        with self._lock:
            try:
                if self._map is None and self.nbytes:
                    self._map = mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_READ)
            except ValueError:  # it has become shorter
                raise self._truncated_error(os.fstat(self._fd).st_size) from None
            except OSError as error:
                raise McaError(f"{self.path}: cannot be read ({error.strerror})") from None
        if self._map is None or offset + nbytes > self.nbytes:
            raise self._truncated_error(self.nbytes)
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def _truncated_error(self, position: int) -> McaError:
        return McaError(f"{self.path}: ended at byte {position} while it was read; was it changed?")

    def check(self) -> None:
        """Raise if the file's checksum is not the manifest's; reads again only what has not passed once."""
        if self.crc32 is None:
            return
        crc = self._full_crc()
        if crc != self.crc32:
            raise McaError(
                f"{self.path}: its checksum is {crc:08x}, the manifest says {self.crc32:08x}; the file is damaged"
            )

    def _full_crc(self) -> int:
        """The file's checksum: of the reads in their order, and of what lies between them."""
        crc = position = 0
        for offset, length, part in sorted(self._passed):
            if offset < position:
                return file_crc32(self.path)
            crc = crc32_join(self._crc_between(crc, position, offset), part, length)
            position = offset + length
        return self._crc_between(crc, position, self.nbytes)

    def _crc_between(self, crc: int, start: int, stop: int) -> int:
        """``crc`` continued by bytes ``start`` to ``stop`` (the header, padding, mapped tensors)."""
        for position in range(start, stop, _AT_ONCE):
            with naming_read_errors(self.path):
                crc = zlib.crc32(os.pread(self._fd, min(_AT_ONCE, stop - position), position), crc)
        return crc

    def close(self) -> None:
        """Close the file; its map lives on while arrays use it."""
        close(self._fd)


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

    def check(self, workers: int, proceed: Callable[[], None] = lambda: None) -> None:
        """Check every file that has a checksum; what has not been read as it lies is read by ``workers`` threads.

        Args:
            workers: How many.
            proceed: Called before each file; raises to stop.

        Raises:
            McaError: One is not what its manifest says.
        """

        def check(file: SourceFile) -> None:
            proceed()
            file.check()

        run_all([self.get(path) for path in self._checksums], workers, lambda: check)

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()
