"""Streaming comparison of two checkpoints as models: same parameters, same shapes, same elements.

Both are read in the order of the Hugging Face tensors, so differences have Hugging Face names in any layout.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import Typed, Values
from mca_convert.chunks import Chunk, split_exactly
from mca_convert.collect import Buffers, Collector
from mca_convert.pool import Limits, run_all
from mca_convert.reader import SourceFiles
from mca_convert.tasks import source_dtypes
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.finite import counts_in
from mca_models.storage.source import ModelSource
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray

if TYPE_CHECKING:
    pass

_SAME_MODEL_MAY_DIFFER = {"layout", "hf_config", "extra", "dtype", "vision_fields"}
_SAYS_NOTHING = frozenset(
    "dtype torch_dtype model_type architectures _name_or_path transformers_version initializer_range "
    "return_dict output_attentions output_hidden_states use_cache chunk_size_feed_forward "
    "is_encoder_decoder problem_type id2label label2id".split()
)
"""Keys of a vision configuration without effect on the features."""
_Pair = tuple[str, str, "_Side", "_Side", tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints in a comparison: a chunk of one tensor and its source."""

    source: ModelSource
    param: Param
    chunk: Chunk
    dtype: str


@dataclass
class TensorDifference:
    """Difference between two versions of a tensor."""

    elements: int = 0
    first: tuple[int, tuple[int, ...], float, float] | None = None
    """Position, index, and the two values of the first different element."""
    largest: float = 0.0


@dataclass
class Comparison:
    """The outcome: the same model if there are neither ``problems`` nor ``differences``."""

    problems: list[str] = field(default_factory=list)
    differences: dict[str, TensorDifference] = field(default_factory=dict)
    tensors: int = 0
    elements: int = 0
    not_finite: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))
    """Numbers of infinite and NaN values of the first and second checkpoint, by tensor."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def same(self) -> bool:
        """Return whether the two are the same model."""
        return not self.problems and not self.differences

    def note(
        self,
        name: str,
        shape: tuple[int, ...],
        arrays: "Sequence[NumpyArray]",
        tolerance: float | None,
        start: int = 0,
    ) -> None:
        """Compare two flat ranges of tensor ``name`` that begin at its element ``start``; thread-safe."""
        import numpy as np

        for counts, array in zip(self.not_finite, arrays, strict=True):
            if number := counts_in([(name, array)]).get(name):
                with self._lock:
                    counts[name] = counts.get(name, 0) + number
        different = _different(arrays[0], arrays[1], tolerance)
        if not different.size:
            return
        values = [array[different].astype(np.float64) for array in arrays]
        with np.errstate(invalid="ignore"):
            apart = np.abs(values[0] - values[1])
        apart[np.isnan(apart)] = np.inf  # a NaN on one side
        apart[np.isnan(values[0]) & np.isnan(values[1])] = 0.0
        largest = float(apart.max())
        position = start + int(different[0])
        index = tuple(int(i) for i in np.unravel_index(position, shape)) if shape else ()
        with self._lock:
            entry = self.differences.setdefault(name, TensorDifference())
            entry.elements += different.size
            entry.largest = max(entry.largest, largest)
            if entry.first is None or position < entry.first[0]:
                entry.first = position, index, float(values[0][0]), float(values[1][0])


def compare(
    first: ModelSource,
    second: ModelSource,
    limits: Limits,
    *,
    tolerance: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Comparison:
    """Compare every element of two models.

    Args:
        first: One checkpoint.
        second: The other.
        limits: Threads and memory.
        tolerance: Largest absolute difference allowed, and dtypes may differ; None compares bits.
        progress: Called with the bytes of ``first`` that have been compared.
    """
    result = Comparison(problems=_different_models(first, second, tolerance))
    for source in (first, second):
        source.check_duplicates()
    if result.problems:
        return result
    files = SourceFiles({**first.checksums(), **second.checksums()})
    worker = _Worker(files, limits, result, tolerance, progress)
    try:
        run_all(_pairs(first, second, result, limits), limits.workers, worker.start)
        files.check(limits.workers)
    finally:
        files.close()
    return result


def _different_models(first: ModelSource, second: ModelSource, tolerance: float | None) -> list[str]:
    problems = [
        f"{name}: {mine!r} and {its!r}" for name, mine, its in _different_fields(first.config, second.config)
    ]
    mine = {param.mca_name(): param for param in first.params}
    its = {param.mca_name(): param for param in second.params}
    for path, names in ((first.path, mine.keys() - its.keys()), (second.path, its.keys() - mine.keys())):
        if names:
            problems.append(
                f"{counted(len(names), 'parameter')} only in {path} ({', '.join(sorted(names)[:4])})"
            )
    dtypes = source_dtypes(first), source_dtypes(second)
    for name in mine.keys() & its.keys():
        shapes = first.full_shape(mine[name]), second.full_shape(its[name])
        if shapes[0] != shapes[1]:
            problems.append(f"{name}: shapes {list(shapes[0])} and {list(shapes[1])}")
        if dtypes[0][name] != dtypes[1][name] and tolerance is None:
            problems.append(f"{name}: {dtypes[0][name]} and {dtypes[1][name]} (--tolerance allows this)")
    return problems


def _different_fields(first: McaModelConfig, second: McaModelConfig) -> Iterator[tuple[str, Typed, Typed]]:
    mine, its = first.to_fields(), second.to_fields()
    for name in sorted((mine.keys() | its.keys()) - _SAME_MODEL_MAY_DIFFER):
        if mine.get(name) != its.get(name):
            yield name, mine.get(name), its.get(name)
    yield from _different_keys("", first.vision_fields or {}, second.vision_fields or {})


def _different_keys(where: str, first: Values, second: Values) -> Iterator[tuple[str, Typed, Typed]]:
    """Yield different keys of two vision configurations in the form of ``config.json``; absent keys equal null."""
    for key in sorted((first.keys() | second.keys()) - _SAYS_NOTHING):
        mine, its = first.get(key), second.get(key)
        if isinstance(mine, dict) and isinstance(its, dict):
            yield from _different_keys(f"{where}{key}.", mine, its)
        elif mine != its:
            yield where + key, mine, its


def _pairs(
    first: ModelSource, second: ModelSource, result: Comparison, limits: Limits
) -> Iterator[tuple[str, tuple[int, ...], _Side, _Side]]:
    """Yield the pairs of chunks to compare with the tensor's shape, and count tensors and elements."""
    dtypes = source_dtypes(first), source_dtypes(second)
    theirs = {param.mca_name(): param for param in second.params}
    for mine in first.params:
        name = mine.mca_name()
        its = theirs[name]
        size = max(ITEM_SIZES[table[name]] for table in dtypes)
        gathers = zip(mine.hf_names(), first.gathers(mine, HF), second.gathers(its, HF), strict=True)
        for tensor, gather, other in gathers:
            label = f"{tensor}[{mine.expert}]" if mine.stacked else tensor
            result.tensors += 1
            result.elements += gather.size
            step = limits.buffer_bytes // size
            for one, two in zip(split_exactly(gather, step), split_exactly(other, step), strict=True):
                sides = _Side(first, mine, one, dtypes[0][name]), _Side(second, its, two, dtypes[1][name])
                yield label, gather.shape, *sides


class _Worker:
    """Comparison of chunks in one thread."""

    def __init__(
        self,
        files: SourceFiles,
        limits: Limits,
        result: Comparison,
        tolerance: float | None,
        progress: Callable[[int], None],
    ) -> None:
        self._files, self._limits, self._result = files, limits, result
        self._tolerance, self._progress = tolerance, progress

    def start(self) -> Callable[[tuple[str, tuple[int, ...], _Side, _Side]], None]:
        """Return the function that one thread calls for each chunk."""
        collector = Collector(self._files, Buffers(self._limits.buffer_bytes), self._limits.computed_bytes)
        return lambda item: self._compare(*item, collector)

    def _compare(
        self, name: str, shape: tuple[int, ...], first: _Side, second: _Side, collector: Collector
    ) -> None:
        arrays = [
            collector.collect(side.chunk, side.source.parts(side.param), side.dtype, buffer)
            for side, buffer in ((first, "first"), (second, "second"))
        ]
        self._result.note(name, shape, arrays, self._tolerance, first.chunk.start)
        self._progress(arrays[0].nbytes)


def _different(first: NumpyArray, second: NumpyArray, tolerance: float | None) -> NumpyArray:
    """Return the positions of different elements."""
    import numpy as np

    if tolerance is None:
        bits = f"u{first.itemsize}"
        same = first.view(bits) == second.view(bits)
    else:
        one, two = first.astype(np.float32), second.astype(np.float32)
        with np.errstate(invalid="ignore"):
            close = np.abs(one - two) <= tolerance
        same = close | (one == two) | (np.isnan(one) & np.isnan(two))
    return np.flatnonzero(~same)
