"""Search for values that are infinite or NaN, and for finite ones that a cast makes infinite.

A conversion that only copies keeps them and logs a warning; one that computes values raises an error.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_convert.fills import FLOATS, Chunk, Fill, split_exactly
from mca_convert.pool import Limits, run_all
from mca_convert.reader import Buffers, Collector, SourceFiles
from mca_models.quantization.fp8 import Fp8Tensor
from mca_models.quantization.mxfp4 import Mxfp4Tensor
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import DTYPE_NAMES, ITEM_SIZES, numpy_dtype
from mca_models.storage.source import ModelSource, Part
from mca_models.storage.values import WORDS, all_finite, named_counts, non_finite, overflows, too_narrow
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray

_FLAGS = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
_ALL = "mca-convert inspect PATH --values lists all such tensors"


def count_by_name(found: Iterable["NonFinite"]) -> dict[str, int]:
    """Return the number of values that are not finite by tensor."""
    return {one.name: one.values for one in found}


@dataclass
class NonFinite:
    """Values of one Hugging Face tensor that are not finite, or that the cast makes infinite."""

    name: str
    file: Path
    values: int = 0
    overflows: int = 0
    largest: float = 0.0
    """Largest overflowing value, by magnitude."""


class RefusedParam(Exception):
    """A parameter has values with which nothing can be computed."""

    def __init__(self, param: Param) -> None:
        super().__init__(param.mca_name())
        self.param = param


class Notes:
    """Collector of the parameters of a conversion that have such values; thread-safe.

    Args:
        source: The checkpoint.
        fills: All fills of the conversion.
    """

    def __init__(self, source: ModelSource, fills: Sequence[Fill]) -> None:
        self._source, self._fills = source, fills
        self.params: dict[str, Param] = {}

    def note(self, fill: Fill) -> None:
        """Keep the parameter of ``fill``.

        Raises:
            RefusedParam: The conversion computes values.
        """
        if self.work is not None:
            raise RefusedParam(fill.param)
        self.params.setdefault(fill.param.mca_name(), fill.param)

    @cached_property
    def work(self) -> str | None:
        """The values that the conversion computes, as the end of "cannot be ..."; None: it only copies."""
        from mca_models.lora import MergedSource

        if isinstance(self._source, MergedSource):
            return "merged; repair the checkpoint or the adapter"
        if any(fill.scales is not None for fill in self._fills):
            return "written as fp8; remove --fp8"
        for fill in self._fills:
            if fill.dtype != fill.source_dtype:
                return f"cast; remove --{_FLAGS[fill.dtype]} to copy it as it is"
        if any(isinstance(part.info, Fp8Tensor | Mxfp4Tensor) for fill in self._fills for part in fill.parts):
            return "dequantised; repair the checkpoint"
        return None

    def casts(self) -> dict[str, str]:
        """Return the dtype code that each parameter is cast to."""
        return {fill.param.mca_name(): fill.dtype for fill in self._fills if fill.dtype in FLOATS}


def search(
    source: ModelSource,
    params: Sequence[Param],
    limits: Limits,
    *,
    casts: Mapping[str, str] = MappingProxyType({}),
    proceed: Callable[[], None] = lambda: None,
    checksums: bool = False,
) -> list[NonFinite]:
    """Read every value of ``params`` and return the tensors with values that are not finite, in their order.

    Args:
        source: The checkpoint.
        params: Of it.
        limits: Threads and memory.
        casts: The dtype codes that parameters are cast to, by Megatron's names; others keep their own.
        proceed: Called with each chunk, from any thread; raises to stop.
        checksums: Compare the checksums of all files of the checkpoint too.

    Raises:
        McaError: A file cannot be read or is damaged.
    """
    found: dict[str, NonFinite] = {}
    labels = [_label(name, param) for param in params for name in param.hf_names()]
    files, lock = SourceFiles(source.checksums() if checksums else {}), threading.Lock()

    def start() -> Callable[[tuple[str, Param, Chunk]], None]:
        collector = Collector(files, Buffers(limits.buffer_bytes), limits.computed_bytes)

        def examine(item: tuple[str, Param, Chunk]) -> None:
            label, param, chunk = item
            proceed()
            parts = source.parts(param)
            data = collector.collect(chunk, parts, parts[0].info.dtype, "out")
            mask, too_large = _masks(data, casts.get(param.mca_name()))
            if not mask.any() and not too_large.any():
                return
            with lock:
                file = _source_file(mask if mask.any() else too_large, chunk, parts)
                entry = found.setdefault(label, NonFinite(label, file))
                entry.values += int(mask.sum())
                entry.overflows += int(too_large.sum())
                magnitudes = abs(data[too_large].astype("float64"))
                entry.largest = max([entry.largest, *magnitudes.tolist()])

        return examine

    try:
        run_all(_chunks(source, params, limits), limits.workers, start)
        files.check(limits.workers, proceed)
    finally:
        files.close()
    return [found[label] for label in labels if label in found]


def _chunks(
    source: ModelSource, params: Sequence[Param], limits: Limits
) -> "Iterable[tuple[str, Param, Chunk]]":
    for param in params:
        step = limits.buffer_bytes // ITEM_SIZES[source.parts(param)[0].info.dtype]
        for name, gather in zip(param.hf_names(), source.gathers(param, HF), strict=True):
            for chunk in split_exactly(gather, step):
                yield _label(name, param), param, chunk


def _label(name: str, param: Param) -> str:
    return f"{name}[{param.expert}]" if param.stacked else name


def _masks(data: NumpyArray, cast: str | None) -> tuple[NumpyArray, NumpyArray]:
    """Return the masks of the elements that are not finite, and of those that a cast makes infinite."""
    import numpy as np

    none = np.zeros(data.shape, bool)
    mask = none if all_finite(data) else non_finite(data)
    if cast is None or numpy_dtype(cast) == data.dtype:
        return mask, none
    with np.errstate(over="ignore", invalid="ignore"):
        target = data.astype(numpy_dtype(cast))
    return mask, none if all_finite(target) else overflows(data, target)


def _source_file(mask: NumpyArray, chunk: Chunk, parts: tuple[Part, ...]) -> Path:
    """Return the first file that elements of ``mask`` come from."""
    import numpy as np

    for move in chunk.moves:
        touched = mask[move.target : move.target + move.target_span]
        strides = move.target_stride, move.target_step  # of bytes
        if np.lib.stride_tricks.as_strided(touched, (move.repeat, move.run), strides).any():
            return parts[move.part].info.file
    return parts[0].info.file


def non_finite_error(found: NonFinite, work: str, cast: str) -> McaError:
    """Return the error about a tensor that a conversion cannot compute with.

    Args:
        found: The tensor.
        work: See `Notes`.
        cast: The dtype code that it is cast to.
    """
    if found.values:
        return McaError(
            f"{found.file}: {found.name} has {counted(found.values, 'value')} {WORDS} and cannot be {work}; {_ALL}"
        )
    verb = "overflows" if found.overflows == 1 else "overflow"
    return McaError(
        f"{found.file}: {found.name} has {counted(found.overflows, 'value')}, the largest {found.largest:g}, that "
        f"{verb} {too_narrow(DTYPE_NAMES[cast])}"
    )


def non_finite_warning(path: Path, counts: Mapping[str, int]) -> str:
    """Return the line about the tensors of a checkpoint that are copied with such values.

    Args:
        path: The checkpoint.
        counts: Number of such values of each.
    """
    return f"{path}: {named_counts(counts)}; they are copied as they are; {_ALL}"
