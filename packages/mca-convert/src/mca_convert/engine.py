"""Carries out fills with a few threads and bounded buffers.

Each thread takes a stretch of one target tensor, reads what makes it up into its own buffer, casts it if
asked, and writes it in one piece; the checksum is summed up while the bytes are in the processor's cache.
Memory is ``workers`` times the buffers, whatever the model's size.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby

from mca_convert.chunks import Chunk, ChunkCache
from mca_convert.collect import Buffers, Collector, is_kept
from mca_convert.pool import Limits, run_all
from mca_convert.reader import SourceFiles
from mca_convert.tasks import Fill, fill_item_size
from mca_models.quantised.blocks import quantised, scale_shape
from mca_models.quantised.tile import BLOCK
from mca_models.storage.cast import cast_into
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import FilePlan
from mca_models.storage.writer import SafetensorsWriter

_STRETCH_CHUNKS = 16  # neighbouring chunks that one thread takes at a time
Progress = Callable[[int], None]
Stretch = list[tuple[Fill, Sequence[Chunk]]]


class Engine:
    """Fills target files.

    Args:
        files: Every target file by the name that fills use.
        sources: The source files.
        limits: Threads and memory.
        checksum: Sum up what is written.
        progress: Called with the bytes of each written chunk, from any thread.
    """

    def __init__(
        self,
        files: Mapping[str, FilePlan],
        sources: SourceFiles,
        limits: Limits,
        *,
        checksum: bool,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        self._plans, self._sources, self._limits = files, sources, limits
        self._checksum, self._progress = checksum, progress
        self._writers: dict[str, SafetensorsWriter] = {}
        self._left: dict[str, int] = dict.fromkeys(files, 0)
        self._lock = threading.Lock()
        self._caches: dict[tuple[int, int], ChunkCache] = {}
        self._buffer_bytes = limits.buffer_bytes

    def run(self, fills: Sequence[Fill]) -> dict[str, FileRecord]:
        """Writes every file completely; returns size and checksum of each.

        Raises:
            McaError: Something could not be read or written; the first such error.
        """
        for fill in fills:
            self._left[fill.file] += fill.nbytes
            self._buffer_bytes = max(self._buffer_bytes, band_elements(fill) * fill_item_size(fill))
        with ExitStack() as stack:
            for name, plan in self._plans.items():
                writer = SafetensorsWriter(plan, checksum=self._checksum)
                self._writers[name] = stack.enter_context(writer)
            run_all(self._stretches(fills), self._limits.workers, self._start_worker)
        return {name: writer.record for name, writer in self._writers.items()}

    def _start_worker(self) -> Callable[[Stretch], None]:
        buffers = Buffers(self._buffer_bytes)
        collector = Collector(self._sources, buffers, self._limits.computed_bytes)

        def carry_out(stretch: Stretch) -> None:
            for fill, chunks in stretch:
                self._carry_out(fill, chunks, collector, buffers)

        return carry_out

    def _stretches(self, fills: Sequence[Fill]) -> Iterator[Stretch]:
        for _, group in groupby(fills, lambda fill: id(fill.parts)):
            jobs = [(fill, self._chunks(fill)) for fill in group]
            if is_kept(jobs[0][0].parts, self._limits.computed_bytes):
                yield jobs  # by one thread, which computes the parts once
                continue
            for fill, chunks in jobs:
                for first in range(0, len(chunks), _STRETCH_CHUNKS):
                    yield [(fill, chunks[first : first + _STRETCH_CHUNKS])]

    def _chunks(self, fill: Fill) -> Sequence[Chunk]:
        size, band = fill_item_size(fill), band_elements(fill)
        elements = self._limits.buffer_bytes // size
        if band:
            elements = max(elements // band, 1) * band
        cache = self._caches.setdefault((size, band), ChunkCache(elements, exactly=band > 0))
        return cache.chunks(fill.gather)

    def _carry_out(self, fill: Fill, chunks: Sequence[Chunk], collector: Collector, buffers: Buffers) -> None:
        writer, size = self._writers[fill.file], ITEM_SIZES[fill.dtype]
        with writer.stretch(fill.tensor, (fill.start + chunks[0].start) * size) as append:
            for chunk in chunks:
                data = collector.collect(chunk, fill.parts, fill.source_dtype, "out")
                if fill.scales is not None:
                    data, scales = quantised(fill.tensor, data.reshape(-1, fill.gather.shape[-1]))
                    writer.write(fill.scales, scales, first_scale(fill, chunk) * scales.itemsize)
                elif fill.dtype != fill.source_dtype:
                    collected, data = data, buffers.array("cast", fill.dtype, data.size)
                    cast_into(collected, data, fill.tensor)
                append(data)
                self._progress(data.nbytes)
        with self._lock:
            self._left[fill.file] -= fill.nbytes_of(chunks[-1].stop - chunks[0].start)
            done = self._left[fill.file] == 0
        if done:
            writer.close()


def band_elements(fill: Fill) -> int:
    """Elements of one row of blocks, which stay together; 0 where there are none."""
    return 0 if fill.scales is None else BLOCK * fill.gather.shape[-1]


def first_scale(fill: Fill, chunk: Chunk) -> int:
    """Which of all scales of a tensor is the first of ``chunk``."""
    rows, columns = scale_shape(fill.gather.shape)
    expert = fill.start // max(fill.gather.size, 1)
    return (expert * rows + chunk.start // band_elements(fill)) * columns
