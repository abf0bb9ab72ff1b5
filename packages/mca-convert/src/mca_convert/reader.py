"""Source files: positioned reads, memory maps for strided reads, and checksums of the bytes read."""

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
        crc32: Checksum in its manifest; None if there is none.
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
        """Fill ``buffer`` from byte ``offset`` on."""
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
        """Return ``nbytes`` from byte ``offset`` on as a memory map."""
        import numpy as np

        with self._lock:
            try:
                if self._map is None and self.nbytes:
                    self._map = mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_READ)
            except ValueError:  # the file has become shorter
                raise self._truncated_error(os.fstat(self._fd).st_size) from None
            except OSError as error:
                raise McaError(f"{self.path}: cannot be read ({error.strerror})") from None
        if self._map is None or offset + nbytes > self.nbytes:
            raise self._truncated_error(self.nbytes)
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def _truncated_error(self, position: int) -> McaError:
        return McaError(f"{self.path}: ended at byte {position} while it was read; was it changed?")

    def check(self) -> None:
        """Raise `McaError` if the checksum differs from the manifest's; only bytes that were not read are read now."""
        if self.crc32 is None:
            return
        crc = self._full_crc()
        if crc != self.crc32:
            raise McaError(
                f"{self.path}: its checksum is {crc:08x}, the manifest says {self.crc32:08x}; the file is damaged"
            )

    def _full_crc(self) -> int:
        """Return the file's checksum from those of the reads, in file order, and of the bytes between them."""
        crc = position = 0
        for offset, length, part in sorted(self._passed):
            if offset < position:
                return file_crc32(self.path)
            crc = crc32_join(self._crc_between(crc, position, offset), part, length)
            position = offset + length
        return self._crc_between(crc, position, self.nbytes)

    def _crc_between(self, crc: int, start: int, stop: int) -> int:
        """Update ``crc`` with bytes ``start`` to ``stop`` (the header, padding, mapped tensors)."""
        for position in range(start, stop, _AT_ONCE):
            with naming_read_errors(self.path):
                crc = zlib.crc32(os.pread(self._fd, min(_AT_ONCE, stop - position), position), crc)
        return crc

    def close(self) -> None:
        """Close the file; its memory map stays as long as arrays use it."""
        close(self._fd)


class SourceFiles:
    """All source files of a conversion, opened on first use."""

    def __init__(self, checksums: Mapping[Path, int]) -> None:
        self._checksums = checksums
        self._files: dict[Path, SourceFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> SourceFile:
        """Return the open file."""
        file = self._files.get(path)
        if file is None:
            with self._lock:
                file = self._files.get(path) or SourceFile(path, self._checksums.get(path))
                self._files[path] = file
        return file

    def check(self, workers: int, proceed: Callable[[], None] = lambda: None) -> None:
        """Check every file that has a checksum, with ``workers`` threads for bytes that were not read in file order.

        Args:
            workers: Number of threads.
            proceed: Called before each file; raises to stop.

        Raises:
            McaError: A file does not match its manifest.
        """

        def check(file: SourceFile) -> None:
            proceed()
            file.check()

        run_all([self.get(path) for path in self._checksums], workers, lambda: check)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
