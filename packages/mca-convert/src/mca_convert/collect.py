"""Assembly of chunks of a target tensor from source files, in one thread's buffers."""

from collections.abc import Iterator
from math import prod

from mca_convert.chunks import Chunk
from mca_convert.reader import SourceFiles
from mca_models.storage.byte_ranges import Move
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part, copy_move
from mca_models.weights.arrays import NumpyArray

_BAND = 1 << 20  # elements that are computed at a time, where a part is too large to keep


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
