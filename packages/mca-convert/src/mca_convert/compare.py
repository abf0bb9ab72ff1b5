"""Comparison of two checkpoints as models, or of two LoRA adapters: same tensors, same shapes, same elements.

Models are read in the order of the Hugging Face tensors, so differences have Hugging Face names in any layout; adapters
are compared under PEFT's names, without their base models.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import Typed, Values
from mca_convert.fills import Chunk, source_dtypes, split_exactly
from mca_convert.pool import ByteCounter, Limits, Progress, allow_open_files, run_all
from mca_convert.reader import Buffers, Collector, SourceFiles
from mca_models.checkpoint.mca_directory import load_config
from mca_models.checkpoint_kinds import checkpoint_kind
from mca_models.quantization.fp8 import Fp8Tensor
from mca_models.quantization.mxfp4 import Mxfp4Tensor
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import ITEM_SIZES, dtype_code
from mca_models.storage.source import ModelSource, Part, first_few
from mca_models.storage.values import counts_in
from mca_models.weights.arrays import NumpyArray

_SAME_MODEL_MAY_DIFFER = {"layout", "hf_config", "extra", "dtype", "vision_fields"}
_SAYS_NOTHING = frozenset(
    "dtype torch_dtype model_type architectures _name_or_path transformers_version initializer_range "
    "return_dict output_attentions output_hidden_states use_cache chunk_size_feed_forward "
    "is_encoder_decoder problem_type id2label label2id".split()
)
"""Keys of a vision configuration without effect on the features."""
_SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_Tensors = Mapping[str, Callable[[], NumpyArray]]


_Side = tuple[Chunk, tuple[Part, ...], str]
"""A chunk of one tensor of a checkpoint, the parts that it is in, and their dtype."""
_Pair = tuple[str, tuple[int, ...], tuple[_Side, _Side]]
"""Name and shape of a tensor, and the same elements of it in both checkpoints."""


@dataclass(kw_only=True)
class TensorDifference:
    """Difference between two versions of a tensor."""

    elements: int
    """Number of different elements."""
    index: tuple[int, ...]
    """Index of the first one in the tensor."""
    values: tuple[float, float]
    """Its two values."""
    largest: float
    """Largest absolute difference; infinite where one value is NaN."""


@dataclass(kw_only=True)
class Comparison:
    """Outcome of a comparison: the two are the same if there are neither ``problems`` nor ``differences``."""

    problems: list[str] = field(default_factory=list)
    """Differences of configurations, names, shapes and dtypes, of adapters also those of their scales.

    Values of models are compared only if there are none, those of adapters where names, shapes and dtypes are the same.
    """
    differences: dict[str, TensorDifference] = field(default_factory=dict)
    """Tensors with different elements, by their Hugging Face names (PEFT's for adapters)."""
    tensors: int = 0
    """Number of compared tensors."""
    elements: int = 0
    """Number of compared elements."""
    not_finite: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))
    """Numbers of infinite and NaN values of the first and second checkpoint, by tensor."""
    adapters: bool = False
    """True if two LoRA adapters were compared."""

    @property
    def same(self) -> bool:
        """Return whether the two are the same."""
        return not self.problems and not self.differences


class _Recorder:
    """Comparison of ranges of elements by several threads.

    Args:
        result: Outcome that it fills.
        tolerance: Largest absolute difference allowed; None compares bits.
    """

    def __init__(self, result: Comparison, tolerance: float | None) -> None:
        self.result, self._tolerance = result, tolerance
        self._positions: dict[str, int] = {}
        self._lock = threading.Lock()

    def compare(
        self, name: str, shape: tuple[int, ...], arrays: Sequence[NumpyArray], start: int = 0
    ) -> None:
        """Compare two flat ranges of tensor ``name`` that begin at its element ``start``."""
        import numpy as np

        for counts, array in zip(self.result.not_finite, arrays, strict=True):
            if number := counts_in([(name, array)]).get(name):
                with self._lock:
                    counts[name] = counts.get(name, 0) + number
        different = _different(arrays[0], arrays[1], self._tolerance)
        if not different.size:
            return
        values = [array[different].astype(np.float64) for array in arrays]
        with np.errstate(invalid="ignore"):
            apart = np.abs(values[0] - values[1])
        apart[np.isnan(apart)] = np.inf  # a NaN on one side
        apart[np.isnan(values[0]) & np.isnan(values[1])] = 0.0
        position = start + int(different[0])
        index = tuple(int(i) for i in np.unravel_index(position, shape)) if shape else ()
        found = TensorDifference(
            elements=different.size,
            index=index,
            values=(float(values[0][0]), float(values[1][0])),
            largest=float(apart.max()),
        )
        with self._lock:
            before = self.result.differences.setdefault(name, found)
            if before is not found:
                before.elements += found.elements
                before.largest = max(before.largest, found.largest)
            if position <= self._positions.setdefault(name, position):
                self._positions[name] = position
                before.index, before.values = found.index, found.values


def compare_models(
    first: ModelSource,
    second: ModelSource,
    limits: Limits,
    *,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every element of two models.

    Args:
        first: One checkpoint.
        second: The other.
        limits: Threads and memory.
        tolerance: Largest absolute difference allowed, and dtypes may differ; None compares bits.
        progress: See `Progress`; the bytes are those of ``first``.
    """
    result = Comparison(problems=_different_models(first, second, tolerance))
    for source in (first, second):
        source.check_duplicates()
    if result.problems:
        return result
    allow_open_files(len({info.file for source in (first, second) for info in source.tensors()}))
    files = SourceFiles({**first.checksums(), **second.checksums()})
    counter = ByteCounter(sum(info.nbytes for info in first.tensors()), progress)
    recorder = _Recorder(result, tolerance)

    def start() -> Callable[[_Pair], None]:
        collector = Collector(files, Buffers(limits.buffer_bytes), limits.computed_bytes)

        def compare(pair: _Pair) -> None:
            name, shape, (one, two) = pair
            arrays = [collector.collect(*one, "first"), collector.collect(*two, "second")]
            recorder.compare(name, shape, arrays, one[0].start)
            counter.add(arrays[0].nbytes)

        return compare

    try:
        run_all(_pairs(first, second, result, limits), limits.workers, start)
        files.check(limits.workers, counter.check)
    finally:
        files.close()
    return result


def _different_models(first: ModelSource, second: ModelSource, tolerance: float | None) -> list[str]:
    problems = [
        f"{name}: {mine!r} and {its!r}" for name, mine, its in _different_fields(first.config, second.config)
    ]
    mine = {param.mca_name(): param for param in first.params}
    its = {param.mca_name(): param for param in second.params}
    problems += _only_in((first.path, second.path), mine.keys(), its.keys(), "parameter")
    dtypes = source_dtypes(first), source_dtypes(second)
    for name in [name for name in mine if name in its]:  # in the order of the model
        shapes = first.full_shape(mine[name]), second.full_shape(its[name])
        if shapes[0] != shapes[1]:
            problems.append(f"{name}: shapes {list(shapes[0])} and {list(shapes[1])}")
        if dtypes[0][name] != dtypes[1][name] and tolerance is None:
            problems.append(f"{name}: {dtypes[0][name]} and {dtypes[1][name]} (--tolerance allows this)")
    return problems


def _only_in(paths: tuple[Path, Path], mine: Set[str], its: Set[str], noun: str) -> list[str]:
    only = zip(paths, (mine - its, its - mine), strict=True)
    return [
        f"{counted(len(names), noun)} only in {path} ({first_few(names)})" for path, names in only if names
    ]


def is_quantized(source: ModelSource) -> bool:
    """Return whether any weight of ``source`` is dequantised as it is read."""
    infos = (part.info for param in source.params for part in source.parts(param))
    return any(isinstance(info, Fp8Tensor | Mxfp4Tensor) for info in infos)


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


def _pairs(first: ModelSource, second: ModelSource, result: Comparison, limits: Limits) -> Iterator[_Pair]:
    """Yield the pairs of chunks to compare, and count tensors and elements."""
    dtypes = source_dtypes(first), source_dtypes(second)
    theirs = {param.mca_name(): param for param in second.params}
    for mine in first.params:
        name = mine.mca_name()
        its = theirs[name]
        size = max(ITEM_SIZES[table[name]] for table in dtypes)
        parts = first.parts(mine), second.parts(its)
        gathers = zip(mine.hf_names(), first.gathers(mine, HF), second.gathers(its, HF), strict=True)
        for tensor, gather, other in gathers:
            label = f"{tensor}[{mine.expert}]" if mine.stacked else tensor
            result.tensors += 1
            result.elements += gather.size
            step = limits.buffer_bytes // size
            for one, two in zip(split_exactly(gather, step), split_exactly(other, step), strict=True):
                sides = (one, parts[0], dtypes[0][name]), (two, parts[1], dtypes[1][name])
                yield label, gather.shape, sides


def _different(first: NumpyArray, second: NumpyArray, tolerance: float | None) -> NumpyArray:
    """Return the positions of different elements."""
    import numpy as np

    if tolerance is None:
        bits = f"u{first.itemsize}"
        same = first.view(bits) == second.view(bits)
    else:
        wide = "f8" if "float64" in (first.dtype.name, second.dtype.name) else "f4"
        one, two = first.astype(wide), second.astype(wide)
        with np.errstate(invalid="ignore"):
            close = np.abs(one - two) <= tolerance
        same = close | (one == two) | (np.isnan(one) & np.isnan(two))
    return np.flatnonzero(~same)


def compare_adapters(first: Path, second: Path, *, tolerance: float | None = None) -> Comparison:
    """Compare every element of two adapters, and their scales.

    Args:
        first: One directory.
        second: The other.
        tolerance: Largest absolute difference allowed, and dtypes may differ; None compares bits.

    Raises:
        McaError: One is damaged, or a full model.
    """
    for path, other in ((first, second), (second, first)):
        if not checkpoint_kind(path).is_adapter:
            raise McaError(
                f"{path} is a full model and {other} an adapter; merge the adapter (--merge) to compare models"
            )
    result = Comparison(problems=list(_different_scales(first, second)), adapters=True)
    recorder = _Recorder(result, tolerance)
    model = _described_model(first) or _described_model(second)
    mine, its = _tensors(first, model), _tensors(second, model)
    result.problems += _only_in((first, second), mine.keys(), its.keys(), "tensor")
    for name in sorted(mine.keys() & its.keys()):
        _compare_arrays(name, mine[name](), its[name](), recorder, tolerance)
    return result


def _compare_arrays(
    name: str, mine: NumpyArray, its: NumpyArray, recorder: _Recorder, tolerance: float | None
) -> None:
    result = recorder.result
    result.tensors += 1
    result.elements += mine.size
    if mine.shape != its.shape:
        result.problems.append(f"{name}: shapes {list(mine.shape)} and {list(its.shape)}")
    elif mine.dtype != its.dtype and tolerance is None:
        codes = f"{dtype_code(mine.dtype)} and {dtype_code(its.dtype)}"
        result.problems.append(f"{name}: {codes} (--tolerance allows this)")
    else:
        recorder.compare(name, mine.shape, [mine.reshape(-1), its.reshape(-1)])


def _different_scales(first: Path, second: Path) -> Iterator[str]:
    from mca_models.lora import AdapterConfig

    mine, its = (AdapterConfig.load(path).document for path in (first, second))
    for key in _SCALES:
        default = 8 if key in ("r", "lora_alpha") else None
        if _ordered(mine.get(key, default)) != _ordered(its.get(key, default)):
            yield f"adapter_config.json, {key}: {mine.get(key)!r} and {its.get(key)!r}"


def _ordered(value: Typed) -> Typed:
    """Return ``value`` to compare; of the patterns of a dict the first that matches counts, so their order does too."""
    return (list(value.items()) if isinstance(value, dict) else value) or None


def _described_model(path: Path) -> McaModelConfig | None:
    """Return the configuration of the base model, which only an MCA adapter has."""
    from mca_models.lora import is_mca_adapter

    return load_config(path) if is_mca_adapter(path) else None


def _tensors(path: Path, model: McaModelConfig | None) -> _Tensors:
    """Return a reader of each tensor; names are checked against ``model`` if that is known."""
    from mca_models.lora import open_adapter
    from mca_models.lora.peft_directory import PeftTensors, stored_tensors

    if model is None:
        return {name: info.array for name, info in stored_tensors(path)[1].items()}
    tensors = PeftTensors(open_adapter(path, model))
    return {name: partial(tensors.array, name) for name in tensors.sources}
