"""Source files: positioned reads, memory maps for strided reads, checksums of the bytes read; chunks made of them."""

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import COPY_AGAIN, naming_read_errors, open_regular
from mca_convert.fills import Chunk
from mca_convert.pool import run_all
from mca_models.storage.byte_ranges import Move
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part, copy_move
from mca_models.storage.staging_folder import close
from mca_models.storage.writer import as_bytes, crc32_join, file_crc32
from mca_models.weights.arrays import Contiguous, NumpyArray

_AT_ONCE = 1 << 20
_BAND = 1 << 20  # elements that are computed at a time, where a part is too large to keep
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14


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
        self._populate(offset, nbytes)
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def _populate(self, offset: int, nbytes: int) -> None:
        """Have the kernel map the pages: one that cannot be read is an error now, and SIGBUS when it is touched."""
        assert self._map is not None
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(_POPULATE_READ, first, offset + nbytes - first)
        except OSError as error:
            if error.errno == errno.EFAULT:  # others mean that the kernel has no such advice
                raise McaError(
                    f"{self.path}: cannot be read to its end; was it changed while it was read, or is its disk broken?"
                ) from None

    def _truncated_error(self, position: int) -> McaError:
        return McaError(f"{self.path}: ended at byte {position} while it was read; was it changed?")

    def check(self) -> None:
        """Raise `McaError` if the checksum differs from the manifest's; only bytes that were not read are read now."""
        if self.crc32 is None:
            return
        crc = self._full_crc()
        if crc != self.crc32:
            raise McaError(
                f"{self.path}: its checksum is {crc:08x}, the manifest says {self.crc32:08x}; the file is damaged, "
                f"{COPY_AGAIN}"
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


class Buffers:
    """Reusable buffers of one thread, allocated on first use."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._raw: dict[str, NumpyArray] = {}
        self._typed: dict[tuple[str, str], NumpyArray] = {}

    def array(self, name: str, dtype: str, size: int) -> NumpyArray:
        """Return the first ``size`` elements of buffer ``name``."""
        typed = self._typed.get((name, dtype))
        if typed is None:
            typed = self._typed[name, dtype] = self._bytes(name).view(numpy_dtype(dtype))
        return typed[:size]

    def _bytes(self, name: str) -> NumpyArray:
        import numpy as np

        if name not in self._raw:
            self._raw[name] = np.empty(self._nbytes, np.uint8)
        return self._raw[name]


class Collector:
    """Reader of the source elements of a chunk; each thread has one."""

    def __init__(self, sources: SourceFiles, buffers: Buffers, computed_bytes: int = 0) -> None:
        self._sources, self._buffers = sources, buffers
        self._computed = ComputedParts(computed_bytes)

    def collect(self, chunk: Chunk, parts: tuple[Part, ...], dtype: str, buffer: str) -> NumpyArray:
        """Return the elements of ``chunk``, in the ``dtype`` of the parts, in buffer ``buffer``."""
        self._computed.keep(parts)
        out = self._buffers.array(buffer, dtype, chunk.stop - chunk.start)
        for start, stop in chunk.zeros:
            out[start:stop] = 0
        for move in chunk.moves:
            part = parts[move.part]
            if isinstance(part.info, TensorInfo):
                self._copy(part.info, part.start, move, out)
            else:
                self._computed.copy(part, move, out)
        return out

    def _copy(self, info: TensorInfo, start: int, move: Move, out: NumpyArray) -> None:
        file, size = self._sources.get(info.file), info.itemsize
        offset = info.offset + (start + move.source) * size
        elements = move.run * move.repeat
        if not move.reads_in_order:
            mapped = file.mapped(offset, move.source_span * size).view(out.dtype)
            copy_move(mapped, out, move._replace(source=0))
        elif not move.writes_in_order:
            scratch = self._buffers.array("scratch", info.dtype, elements)
            file.read_into(scratch, offset)
            copy_move(scratch, out, move._replace(source=0))
        else:
            file.read_into(out[move.target : move.target + elements], offset)


def computed_bytes(part: Part) -> int:
    """Return the bytes of ``part`` after reading."""
    return prod(part.shape) * part.info.itemsize


def is_any_kept(parts: tuple[Part, ...], limit: int) -> bool:
    """Return whether any of ``parts`` is computed and small enough for the cache."""
    return any(not isinstance(part.info, TensorInfo) and computed_bytes(part) <= limit for part in parts)


class ComputedParts:
    """Source of computed (dequantized or merged) parts, with a cache of small ones for the next chunk.

    Args:
        nbytes: Largest size of a cached part.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes
        self._kept: dict[tuple[int, int], tuple[Part, NumpyArray]] = {}

    def copy(self, part: Part, move: Move, out: NumpyArray) -> None:
        """Copy ``move`` from ``part`` to ``out``."""
        if computed_bytes(part) <= self._limit:
            copy_move(self._whole(part), out, move)
            return
        flat = part.elements()
        for piece in split_bands(move, _BAND):
            start = part.start + piece.source
            band = flat[start : start + piece.source_span]
            copy_move(band, out, piece._replace(source=0))

    def keep(self, parts: tuple[Part, ...]) -> None:
        """Remove all cached parts except ``parts``."""
        if self._kept:
            keys = {_key(part) for part in parts}
            self._kept = {key: kept for key, kept in self._kept.items() if key in keys}

    def _whole(self, part: Part) -> NumpyArray:
        if _key(part) not in self._kept:
            self._kept[_key(part)] = part, part.flat()
        return self._kept[_key(part)][1]


def _key(part: Part) -> tuple[int, int]:
    return id(part.info), part.start


def split_bands(move: Move, elements: int) -> Iterator[Move]:
    """Split ``move`` so that each part spans about ``elements`` of the source, unless single runs are longer."""
    step = max(1, elements // max(1, move.source_stride))
    for first in range(0, move.repeat, step):
        yield move._replace(
            source=move.source + first * move.source_stride,
            target=move.target + first * move.target_stride,
            repeat=min(step, move.repeat - first),
        )
