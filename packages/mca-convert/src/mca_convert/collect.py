"""Collects stretches of a target tensor from source files into one thread's buffers."""

from typing import TYPE_CHECKING, Any

from mca_convert.chunks import Chunk
from mca_convert.reader import SourceFiles
from mca_models.checkpoint import Part
from mca_models.checkpoint.dtypes import ITEM_SIZES, numpy_dtype
from mca_models.checkpoint.runs import Move
from mca_models.checkpoint.source import copy_move

if TYPE_CHECKING:
    import numpy as np


class Buffers:
    """One thread's reusable memory, made when first used."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._raw: dict[str, np.ndarray[Any, Any]] = {}

    def bytes(self, name: str, count: int) -> "np.ndarray[Any, Any]":
        """The first ``count`` bytes of buffer ``name``."""
        import numpy as np

        if name not in self._raw:
            self._raw[name] = np.empty(self._nbytes, np.uint8)
        return self._raw[name][:count]

    def array(self, name: str, dtype: str, size: int) -> "np.ndarray[Any, Any]":
        """The first ``size`` elements of buffer ``name``."""
        return self.bytes(name, size * ITEM_SIZES[dtype]).view(numpy_dtype(dtype))


class Collector:
    """Reads what makes up a chunk; one for each thread."""

    def __init__(self, sources: SourceFiles, buffers: Buffers) -> None:
        self._sources, self._buffers = sources, buffers

    def collect(
        self, chunk: Chunk, parts: tuple[Part, ...], dtype: str, buffer: str
    ) -> "np.ndarray[Any, Any]":
        """The elements of ``chunk``, in the parts' own ``dtype``, in buffer ``buffer``."""
        out = self._buffers.array(buffer, dtype, chunk.stop - chunk.start)
        for start, stop in chunk.zeros:
            out[start:stop] = 0
        for move in chunk.moves:
            self._copy(parts[move.part], move, out)
        return out

    def _copy(self, part: Part, move: Move, out: "np.ndarray[Any, Any]") -> None:
        file, size = self._sources.get(part.info.file), part.info.itemsize
        offset = part.info.offset + (part.start + move.source) * size
        elements = move.run * move.repeat
        if move.repeat > 1 and move.source_stride != move.run:
            span = ((move.repeat - 1) * move.source_stride + move.run) * size
            mapped = file.bytes_map()[offset : offset + span].view(out.dtype)
            copy_move(mapped, out, move._replace(source=0))
        elif move.repeat > 1 and move.target_stride != move.run:
            scratch = self._buffers.array("scratch", part.info.dtype, elements)
            file.read_into(scratch, offset)
            copy_move(scratch, out, move._replace(source=0))
        else:
            file.read_into(out[move.target : move.target + elements], offset)
