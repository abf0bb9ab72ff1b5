"""The safetensors format, read strictly and written by position.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back:

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}

The reader trusts nothing: every length, offset and shape is checked against the file's size before any
tensor is touched. The writer knows all shapes before the first byte, so tensors may be written in any
order, in parts, by several threads.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

from mca_config.errors import McaError
from mca_config.files import COPY_AGAIN, naming_read_errors, open_regular
from mca_config.types import JsonObject, Typed
from mca_models.storage.dtypes import ITEM_SIZES, numpy_dtype
from mca_models.weights.arrays import Contiguous, NumpyArray

MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
_METADATA = "__metadata__"
_LONGEST_NAME = 1000
_MOST_BYTES, _MOST_AXES = (1 << 63) - 1, 32
_ALIGNMENT = 4096  # of the first tensor: whole pages are written and mapped faster


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Position of one tensor in a safetensors file."""

    name: str
    dtype: str
    """Safetensors code, e.g. ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    file: Path

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    def array(self) -> NumpyArray:
        """A read-only view of the tensor, mapped from the file: pages are read when touched."""
        import numpy as np

        if self.nbytes == 0:
            return np.empty(self.shape, numpy_dtype(self.dtype))
        skipped = self.offset % ALLOCATIONGRANULARITY
        with naming_read_errors(self.file), self.file.open("rb") as file:
            try:  # np.memmap does the same, and resolves the path each time
                pages = mmap(
                    file.fileno(), skipped + self.nbytes, access=ACCESS_READ, offset=self.offset - skipped
                )
            except ValueError:
                raise McaError(f"{self.file}: ended inside tensor {self.name}; was it changed?") from None
        flat = np.frombuffer(pages, np.uint8, offset=skipped)
        return flat.view(numpy_dtype(self.dtype)).reshape(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """A fresh array of rows ``start:stop`` (of everything, for a scalar)."""
        import numpy as np

        rows = self.shape[0] if self.shape else 1
        stop = rows if stop is None else stop
        row_bytes = self.nbytes // rows if rows else 0
        out = np.empty((stop - start, *self.shape[1:]) if self.shape else (), numpy_dtype(self.dtype))
        with naming_read_errors(self.file), self.file.open("rb") as file:
            file.seek(self.offset + start * row_bytes)
            buffer: Contiguous = out.reshape(-1).view(np.uint8)
            if file.readinto(buffer) != out.nbytes:
                raise McaError(
                    f"{self.file}: ended inside tensor {self.name}; the file is truncated, {COPY_AGAIN}"
                )
        return out


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file."""

    file: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The checked header of ``file``.

    Raises:
        McaError: The file is missing, truncated or inconsistent, naming it and the first fault.
    """
    raw, start, size = _read_raw_header(file)
    entries = _parse_json(file, raw)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise McaError(f"{file}: {_METADATA} must map names to strings")
    tensors = {name: _tensor(file, name, entry, start) for name, entry in entries.items()}
    _require_contiguous(file, tensors.values(), start, size)
    return Header(file, tensors, metadata)


def _read_raw_header(file: Path) -> tuple[bytes, int, int]:
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise McaError(
                    f"{file}: {size} bytes are too few for a safetensors file; it is truncated, {COPY_AGAIN}"
                )
            if prefix == b"version ":
                raise McaError(
                    f"{file}: a git-lfs pointer, not the weights; fetch them with 'git lfs pull' in {file.parent}"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise McaError(
                    f"{file}: its header claims {length} bytes, the file has {size}; it is truncated ({COPY_AGAIN}) "
                    "or not a safetensors file"
                )
            return stream.read(length), 8 + length, size
    except FileNotFoundError:
        raise McaError(f"{file}: no such file") from None
    except OSError as error:
        raise McaError(f"{file}: cannot be read ({error.strerror})") from None


def _parse_json(file: Path, raw: bytes) -> JsonObject:
    def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise McaError(f"{file}: the header names {twice!r} twice")
        return entries

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except McaError:
        raise
    except (ValueError, RecursionError):  # too many digits are a ValueError too
        raise McaError(f"{file}: the header is not valid JSON; the file is damaged, {COPY_AGAIN}") from None
    if not isinstance(entries, dict):
        raise McaError(f"{file}: the header is not a JSON object; the file is damaged")
    return entries


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(file: Path, name: str, entry: Typed, start: int) -> TensorInfo:
    where = f"{file}: tensor {name!r:.200}"
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise McaError(f"{where}: no name of a tensor: too long, or with characters that cannot be printed")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise McaError(f"{where}: its entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise McaError(f"{where}: unknown dtype {dtype!r:.80}; known are {', '.join(ITEM_SIZES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise McaError(f"{where}: shape {shape!r:.80} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise McaError(f"{where}: data_offsets {offsets!r:.80} are not two positions")
    if max([*shape, *offsets], default=0) > _MOST_BYTES or len(shape) > _MOST_AXES:
        raise McaError(f"{where}: {dtype} {shape!r:.80} takes more bytes than a file can have")
    nbytes = prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise McaError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets give {offsets[1] - offsets[0]}"
        )
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], nbytes, file)


def _require_contiguous(file: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    position = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            fault = "overlaps the tensor before it" if info.offset < position else "leaves a hole before it"
            raise McaError(f"{file}: tensor {info.name!r} {fault}; the file is damaged")
        position += info.nbytes
    if position != size:
        what = f"is truncated, {COPY_AGAIN}" if position > size else "has bytes after its last tensor"
        raise McaError(f"{file}: the tensors end at byte {position}, the file at {size}; it {what}")


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file before it is written: all names, types and shapes, in stored order."""

    file: Path
    tensors: Mapping[str, TensorInfo]
    header: bytes

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(info.nbytes for info in self.tensors.values())


def plan_file(
    file: Path,
    specs: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    """The layout of a file that is to hold ``specs`` (name, dtype code, shape).

    Tensors keep the given order, wider elements first, so that each is aligned to its element size.
    """
    ordered = sorted(specs, key=lambda spec: -ITEM_SIZES[spec[1]])
    entries: JsonObject = {_METADATA: dict(metadata)} if metadata else {}
    places, position = [], 0
    for name, dtype, shape in ordered:
        nbytes = prod(shape) * ITEM_SIZES[dtype]
        if name in entries:
            raise McaError(f"{file}: tensor {name!r} is to be written twice")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        places.append((name, dtype, tuple(shape), position, nbytes))
        position += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    infos = {n: TensorInfo(n, d, s, len(header) + p, size, file) for n, d, s, p, size in places}
    return FilePlan(file, infos, header)
