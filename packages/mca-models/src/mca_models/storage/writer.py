"""Writes one planned safetensors file, in any order, and sums it up as the bytes pass.

Which tensors a file holds is planned in `safetensors`; directories are `atomic`'s. Several threads
sum up one file: CRC-32 is linear over GF(2), crc(A + B) = crc(A) * x^(8 len(B)) xor crc(B), as polynomials modulo the
CRC's own. Bits are reflected, as in zlib: the highest bit is the coefficient of x^0.
"""

import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import naming_read_errors, write_error
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import FilePlan, TensorInfo
from mca_models.storage.staging_folder import close
from mca_models.weights.arrays import Contiguous

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_CHUNK = 8 << 20


def _times(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial, by repeated squaring."""
    power, square = _ONE, 1 << 23  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        nbytes >>= 1
    return power


@lru_cache(maxsize=64)
def _shifted_bytes(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """For each of the four bytes of a checksum what it becomes, times x^(8 nbytes)."""
    bits = [_times(_shift(nbytes), 1 << bit) for bit in range(32)]
    tables = []
    for low in range(0, 32, 8):
        table = [0]
        for bit in bits[low : low + 8]:
            table += [entry ^ bit for entry in table]
        tables.append(tuple(table))
    return tuple(tables)


def crc32_join(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two parts one after the other, from theirs and the length of the second."""
    a, b, c, d = _shifted_bytes(second_nbytes)
    shifted = a[first & 255] ^ b[first >> 8 & 255] ^ c[first >> 16 & 255] ^ d[first >> 24]
    return shifted ^ second


def file_crc32(file: Path) -> int:
    """The CRC-32 of all of ``file``, read through a bounded buffer."""
    buffer, crc = bytearray(_CHUNK), 0
    view = memoryview(buffer)
    with naming_read_errors(file), file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := stream.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc


_Part = tuple[int, int, int]  # start, length, checksum

Written = Mapping[str, Sequence[_Part]]
"""Written ranges of one process in a file: start, length and checksum of each stretch, by tensor."""
_SYNC_FILE_RANGE_WRITE = 2
_WRITEBACK_BYTES = 16 << 20


def as_bytes(data: Contiguous) -> memoryview:
    """The bytes of a contiguous buffer or NumPy array (those of ``ml_dtypes`` too)."""
    if hasattr(data, "dtype"):
        data = data.reshape(-1).view("u1")
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Writeback:
    """Has the kernel begin to write what it holds of a file, so that the sync at the end finds little to do."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self._start, self._stop, self._nbytes = 0, 0, 0

    def add(self, start: int, nbytes: int) -> None:
        """``nbytes`` from ``start`` on are there; what is small waits until it has grown."""
        with self._lock:
            self._start = min(self._start, start) if self._nbytes else start
            self._stop = max(self._stop, start + nbytes) if self._nbytes else start + nbytes
            self._nbytes += nbytes
            if self._nbytes < _WRITEBACK_BYTES:
                return
            start, nbytes, self._nbytes = self._start, self._stop - self._start, 0
        if _sync_file_range is not None:
            _sync_file_range(self._fd, start, nbytes, _SYNC_FILE_RANGE_WRITE)  # a hint: failing does no harm


def _load_sync_file_range() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:  # only on Linux
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _load_sync_file_range()


class SafetensorsWriter:
    """An open file that is being filled; thread-safe.

    Use as a context manager. Leaving it without an error checks that every byte has been written, and
    syncs the file to disk; ``record`` then holds its size and checksum.

    Args:
        plan: The file; its directory is made, the file must not exist.
        checksum: Sum the bytes up; else ``record`` has checksum 0.
        joins: The file has been made (``make_file``) and several processes write parts of it. What this one wrote is
            ``written``, once it is closed; ``joined_record`` puts all of it together.
    """

    def __init__(self, plan: FilePlan, *, checksum: bool = True, joins: bool = False) -> None:
        self.plan = plan
        self._checksum, self._joins = checksum, joins
        self._parts: dict[str, list[_Part]] = {name: [] for name in plan.tensors}
        self._lock = threading.Lock()
        self._crc32: int | None = None
        if not joins:
            make_file(plan)
        try:
            self._fd = os.open(plan.file, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise write_error(plan.file, error) from None
        self._writeback = Writeback(self._fd)

    def write(self, name: str, data: Contiguous, start: int = 0) -> None:
        """Write ``data`` (anything with contiguous bytes) at byte ``start`` of tensor ``name``."""
        with self.stretch(name, start) as append:
            append(data)

    @contextmanager
    def stretch(self, name: str, start: int = 0) -> Iterator[Callable[[Contiguous], None]]:
        """A function that appends data to tensor ``name``, from byte ``start`` on."""
        info = self.plan.tensors[name]
        position, crc = start, 0

        def append(data: Contiguous) -> None:
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
        self._writeback.add(info.offset + start, position - start)
        with self._lock:
            self._parts[name].append((start, position - start, crc))

    def _put(self, data: Contiguous, position: int) -> None:
        try:
            _pwrite(self._fd, data, position)
        except OSError as error:
            raise write_error(self.plan.file, error) from None

    def close(self) -> None:
        """Check completeness, computes the checksum, syncs and closes. A second call does nothing."""
        if self._crc32 is not None:
            return
        crc = 0 if self._joins else _crc32(self.plan, self._parts, checksum=self._checksum)
        try:
            os.fsync(self._fd)
            self._crc32 = crc  # a close that fails has closed
            os.close(self._fd)
        except OSError as error:  # some file systems find a full disk only now
            raise write_error(self.plan.file, error) from None

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the file, once it is closed."""
        self._require_closed()
        return FileRecord(self.plan.nbytes, self._crc32 or 0)

    @property
    def written(self) -> Written:
        """Return the stretches that this writer wrote, once it is closed."""
        self._require_closed()
        return {name: parts for name, parts in self._parts.items() if parts}

    def _require_closed(self) -> None:
        if self._crc32 is None:
            raise ValueError(f"{self.plan.file} is not closed yet")

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._crc32 is None:
            close(self._fd)


def make_file(plan: FilePlan) -> None:
    """Make the file with its header and all its room, so that a full disk is found before any work."""
    plan.file.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(plan.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, plan.nbytes)
            _pwrite(fd, plan.header, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise write_error(plan.file, error, plan.nbytes) from None


def joined_record(plan: FilePlan, written: Iterable[Written]) -> FileRecord:
    """Size and checksum of a file that several processes wrote.

    Args:
        plan: The file.
        written: Of each of them.

    Raises:
        McaError: Together they did not write every byte once.
    """
    parts: dict[str, list[_Part]] = {name: [] for name in plan.tensors}
    for stretches_by_name in written:
        for name, stretches in stretches_by_name.items():
            parts[name] += stretches
    return FileRecord(plan.nbytes, _crc32(plan, parts, checksum=True))


def _crc32(plan: FilePlan, parts: Mapping[str, Sequence[_Part]], *, checksum: bool) -> int:
    """The checksum of the whole file, found to be written completely; 0 without ``checksum``."""
    crc = zlib.crc32(plan.header)
    for name, info in sorted(plan.tensors.items(), key=lambda item: item[1].offset):
        for _, length, part in _complete_parts(plan, info, parts[name]):
            crc = crc32_join(crc, part, length) if checksum else 0
    return crc


def _complete_parts(plan: FilePlan, info: TensorInfo, written: Iterable[_Part]) -> list[_Part]:
    parts, position = sorted(part for part in written if part[1]), 0
    for start, length, _ in parts:
        if start != position:
            break
        position += length
    if position != info.nbytes or sum(length for _, length, _ in parts) != info.nbytes:
        raise McaError(
            f"{plan.file}: tensor {info.name} was not written completely and once (bytes {position} of "
            f"{info.nbytes})"
        )
    return parts


def _pwrite(fd: int, data: Contiguous, position: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
