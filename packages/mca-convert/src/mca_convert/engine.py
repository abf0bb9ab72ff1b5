"""Execution of fills with a few threads and bounded buffers.

Each thread reads a range of one target tensor into its buffer, casts it if requested, and writes it with one call;
the checksum is computed while the bytes are in the processor's cache. Memory is ``workers`` times the buffers,
independent of the model's size.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from mca_convert.fills import Chunk, Chunking, Fill, band_elements, fill_item_size
from mca_convert.pool import Limits, run_all
from mca_convert.reader import Buffers, Collector, SourceFiles, is_any_kept
from mca_models.quantization.fp8 import Fp8Tile, quantize, scale_shape
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import FilePlan
from mca_models.storage.values import Overflow, all_finite, cast_into
from mca_models.storage.writer import SafetensorsWriter

_STRETCH_CHUNKS = 16  # neighbouring chunks that one thread takes at a time
Progress = Callable[[int], None]
Stretch = list[tuple[Fill, Sequence[Chunk]]]


@dataclass(frozen=True)
class _Worker:
    """Buffers of one thread."""

    buffers: Buffers
    collector: Collector
    tile: Fp8Tile | None


class Engine:
    """Writer of target files.

    Args:
        files: Target files by the name in the fills.
        sources: The source files.
        limits: Threads and memory.
        checksum: Compute checksums of the written files.
        progress: Called with the bytes of each written chunk, from any thread.
        note: Called from any thread with each fill that has a NaN or infinite value, or one that its cast makes
            infinite; may raise an error.
    """

    def __init__(
        self,
        files: Mapping[str, FilePlan],
        sources: SourceFiles,
        limits: Limits,
        *,
        checksum: bool,
        progress: Progress = lambda nbytes: None,
        note: Callable[[Fill], None] = lambda fill: None,
    ) -> None:
        self._plans, self._sources, self._limits = files, sources, limits
        self._checksum, self._progress, self._note = checksum, progress, note
        self._writers: dict[str, SafetensorsWriter] = {}
        self._left: dict[str, int] = dict.fromkeys(files, 0)
        self._lock = threading.Lock()
        self._chunking = Chunking(limits.buffer_bytes)
        self._buffer_bytes, self._makes_blocks = limits.buffer_bytes, False

    def run(self, fills: Sequence[Fill]) -> dict[str, FileRecord]:
        """Write all files and return size and checksum of each.

        Raises:
            McaError: A file cannot be read or written; the first such error.
        """
        for fill in fills:
            self._left[fill.file] += fill.nbytes
            self._buffer_bytes = max(self._buffer_bytes, band_elements(fill) * fill_item_size(fill))
            self._makes_blocks |= fill.scales is not None
        with ExitStack() as stack:
            for name, plan in self._plans.items():
                writer = SafetensorsWriter(plan, checksum=self._checksum)
                self._writers[name] = stack.enter_context(writer)
            run_all(self._stretches(fills), self._limits.workers, self._start_worker)
        return {name: writer.record for name, writer in self._writers.items()}

    def _start_worker(self) -> Callable[[Stretch], None]:
        buffers = Buffers(self._buffer_bytes)
        collector = Collector(self._sources, buffers, self._limits.computed_bytes)
        worker = _Worker(buffers, collector, Fp8Tile() if self._makes_blocks else None)

        def write(stretch: Stretch) -> None:
            for fill, chunks in stretch:
                self._write(fill, chunks, worker)

        return write

    def _stretches(self, fills: Sequence[Fill]) -> Iterator[Stretch]:
        for _, group in groupby(fills, lambda fill: id(fill.parts)):
            jobs: Stretch = [(fill, self._chunking.chunks(fill)) for fill in group]
            if is_any_kept(jobs[0][0].parts, self._limits.computed_bytes):
                yield jobs  # for one thread, which computes the parts once
                continue
            for fill, chunks in jobs:
                for first in range(0, len(chunks), _STRETCH_CHUNKS):
                    yield [(fill, chunks[first : first + _STRETCH_CHUNKS])]

    def _write(self, fill: Fill, chunks: Sequence[Chunk], worker: _Worker) -> None:
        writer, size = self._writers[fill.file], ITEM_SIZES[fill.dtype]
        with writer.stretch(fill.tensor, (fill.start + chunks[0].start) * size) as append:
            for chunk in chunks:
                data = worker.collector.collect(chunk, fill.parts, fill.source_dtype, "out")
                if not all_finite(data):
                    self._note(fill)
                if fill.scales is not None:
                    values = worker.buffers.array("cast", "U8", data.size)
                    rows = data.reshape(-1, fill.gather.shape[-1])
                    data, scales = quantize(fill.tensor, rows, values, worker.tile)
                    writer.write(fill.scales, scales, first_scale(fill, chunk) * scales.itemsize)
                elif fill.dtype != fill.source_dtype:
                    collected, data = data, worker.buffers.array("cast", fill.dtype, data.size)
                    try:
                        cast_into(collected, data, fill.tensor)
                    except Overflow:
                        self._note(fill)
                        raise
                append(data)
                self._progress(data.nbytes)
        with self._lock:
            self._left[fill.file] -= fill.count_bytes(chunks[-1].stop - chunks[0].start)
            done = self._left[fill.file] == 0
        if done:
            writer.close()


def first_scale(fill: Fill, chunk: Chunk) -> int:
    """Return the index of the first scale of ``chunk`` among all scales of its tensor."""
    rows, columns = scale_shape(fill.gather.shape)
    expert = fill.start // max(fill.gather.size, 1)
    return (expert * rows + chunk.start // band_elements(fill)) * columns
