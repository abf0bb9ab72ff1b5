"""Plan of a conversion of a model or a LoRA adapter: its files, sizes, memory and errors; nothing is written."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal, TypeVar

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.types import JsonObject
from mca_convert.conversion import (
    Conversion,
    bytes_on_disk,
    plan_to_hf,
    plan_to_mca,
    require_adapter,
    require_free_destination,
)
from mca_convert.fills import Chunk, Chunking, Fill, band_elements, dtype_faults, fill_item_size
from mca_convert.non_finite import Notes, count_by_name, non_finite_error, non_finite_warning, search
from mca_convert.output import format_size
from mca_convert.pool import Limits, too_many_files
from mca_convert.reader import computed_bytes
from mca_convert.request import Request, conversion_target, target_layout
from mca_models.checkpoint.config_only import ConfigOnlySource
from mca_models.checkpoint.hf_directory import StoredTensor, has_weights
from mca_models.checkpoint.hf_writer import METADATA
from mca_models.checkpoint.mca_directory import McaLayout, is_mca, iteration_name, layout_faults, load_config
from mca_models.checkpoint.side_files import side_files
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind, open_checkpoint
from mca_models.lora import (
    Adapter,
    MergedSource,
    PeftTensors,
    cast_adapter,
    is_mca_adapter,
    load_model_config,
    open_adapter,
    plan_adapter,
    with_layout,
)
from mca_models.lora.peft_directory import WEIGHTS
from mca_models.quantization.fp8_tile import TILE_BYTES
from mca_models.storage.atomic import staging_parent
from mca_models.storage.dtypes import ITEM_SIZES, dtype_code
from mca_models.storage.finite import named_counts
from mca_models.storage.safetensors import TensorInfo, plan_file
from mca_models.storage.source import ModelSource

T = TypeVar("T")
_THREAD_BYTES = 200 << 10  # a thread's stack and its share of the allocator
_COMPUTE_BYTES = 3 << 20  # of one thread, while it dequantises
_WORK_BYTES = 1 << 20  # temporary objects of a conversion


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One pipeline rank of the target: its layers, and the sizes of its shards."""

    rank: int
    """Pipeline rank, from 0."""
    holds: str
    """Text for people."""
    layers: tuple[int, ...]
    """Indices of its transformer layers."""
    prediction_layers: tuple[int, ...]
    """Indices of its MTP layers."""
    has_embedding: bool
    has_loss: bool
    tensors: int
    """Number of its parameters, before they are cut."""
    dense_bytes: int
    """Bytes of the largest tensor-parallel rank."""
    expert_bytes: int
    """Bytes of the largest expert-parallel rank; 0 without experts."""


@dataclass(kw_only=True)
class ConversionPlan:
    """Reads, writes and memory of a conversion, and the errors that it would raise."""

    source: str
    """The checkpoint, or the adapter if that is converted."""
    target: Literal["mca", "hf"]
    kind: str = ""
    """Kind of the source for people, such as ``Hugging Face checkpoint``; empty: there is none."""
    config_only: bool = False
    """True if no weights were found, so that sizes follow from ``config.json``."""
    model_type: str = ""
    layout: str = ""
    """Layout of an MCA target for people."""
    layout_sizes: JsonObject = field(default_factory=dict)
    """Fields of that `mca_config.ParallelLayout` by name."""
    tensors: int = 0
    """Number of tensors by Hugging Face names."""
    parameters: int = 0
    """Number of elements."""
    read_bytes: int = 0
    written_bytes: int = 0
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file with weights, by its name in the new directory."""
    stages: list[PlannedStage] = field(default_factory=list)
    """Pipeline ranks of an MCA target."""
    peak_bytes: int = 0
    """Estimate of the process's largest anonymous memory."""
    workers: int = 0
    """Number of threads."""
    refusals: list[str] = field(default_factory=list)
    """Errors that the conversion would raise, one line each."""
    notes: list[str] = field(default_factory=list)
    """Other remarks, one line each."""

    @property
    def is_possible(self) -> bool:
        """Return whether the conversion can run."""
        return not self.refusals

    def _attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of ``step``; on an error record it and return None."""
        try:
            return step()
        except McaError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        self.refusals += [line for line in [reason] if line not in self.refusals]
        return None


def forecast(request: Request) -> ConversionPlan:
    """Plan ``request`` as far as possible, without writing anything."""
    if request.adapter is not None and not request.merge:
        return _forecast_adapter(request, request.adapter)
    return _forecast_model(request)


def _forecast_model(request: Request) -> ConversionPlan:
    path = request.require_checkpoint()
    result = ConversionPlan(source=str(path), target=request.to or "mca", workers=request.limits.workers)
    kind = result._attempt(lambda: checkpoint_kind(path))
    if kind is not None:
        result.kind = kind.value
        result.target = conversion_target(request, from_megatron=kind.is_megatron)
    _check_destination(request, result)
    source = None if kind is None else _open(path, request, kind, result)
    if source is not None and request.adapter is not None:
        source = _merged(source, request.adapter, request.cast, result)
    if source is None:
        return result
    base = source.config.layout
    layout = result._attempt(lambda: target_layout(request.layout, base))
    conversion = _plan(request, source, layout, result)
    if conversion is not None:
        _describe(conversion, request, result)
        _require_space(request.destination, lambda: conversion.disk_bytes, result)
        if not result.config_only:
            _report_values(conversion, request, result)
    return result


def _merged(base: ModelSource, path: Path, cast: str | None, result: ConversionPlan) -> ModelSource | None:
    return result._attempt(lambda: MergedSource(base, open_adapter(path, base.config), cast))


def _open(path: Path, request: Request, kind: CheckpointKind, result: ConversionPlan) -> ModelSource | None:
    """Open the source; if that fails, return one from its configuration alone, for a partial forecast."""
    if kind is not CheckpointKind.HF or has_weights(path):
        source = result._attempt(lambda: open_checkpoint(path, request.cast))
        if source is not None:
            result._attempt(source.check_duplicates)
            result._attempt(lambda: side_files(path))
            return source
        if kind.is_adapter:
            return None
    else:
        result.notes.append(
            "there is only a config.json: sizes are computed from it, and no file was checked"
        )
    result.config_only = True
    seen = list(result.refusals)
    config = result._attempt(lambda: load_config(path)) if is_mca(path) else None
    if is_mca(path) and config is None:
        return None
    config_only = result._attempt(lambda: ConfigOnlySource(path, config, request.cast))
    if seen:
        result.refusals = seen  # the configuration's own faults were reported when it was opened
    return config_only


def _plan(
    request: Request, source: ModelSource, layout: ParallelLayout | None, result: ConversionPlan
) -> Conversion | None:
    result.model_type = source.config.model_type
    result.tensors = len({name for param in source.params for name in param.hf_names()})
    result.parameters = sum(prod(source.full_shape(param)) for param in source.params)
    result.read_bytes = sum(_stored_bytes(info) for info in source.tensors())
    faults = list(dtype_faults(source))
    if layout is not None and result.target == "mca":
        result.layout, result.layout_sizes = str(layout), dataclasses.asdict(layout)
        wholes = {param.mca_name(): source.full_shape(param) for param in source.params}
        faults += layout_faults(source.params, replace(source.config, layout=layout), wholes)
    result.refusals += faults
    if faults or (layout is None and result.target == "mca"):
        return None
    if result.target == "hf":
        return result._attempt(
            lambda: plan_to_hf(source, request.cast, request.max_shard_bytes, fp8=request.fp8)
        )
    return result._attempt(lambda: plan_to_mca(source, layout or ParallelLayout(), request.cast))


def _report_values(conversion: Conversion, request: Request, result: ConversionPlan) -> None:
    """Report values that are not finite, or not finite after the cast, with ``--values``; else how to find them."""
    notes = Notes(conversion.source, conversion.fills)
    if not request.values:
        if notes.work is not None:
            result.notes.append(
                "no value was read; the conversion fails if one is not finite in the target; --values reads them"
            )
        return
    source, casts = conversion.source, notes.casts()
    read = partial(search, source, source.params, request.limits, casts=casts, checksums=True)
    found = result._attempt(read)
    if not found:
        return
    if notes.work is None:
        result.notes.append(non_finite_warning(source.path, count_by_name(found)))
    else:
        result.refusals += [str(non_finite_error(one, notes.work, request.cast or "")) for one in found]


def _stored_bytes(info: StoredTensor) -> int:
    """Return the bytes on disk, which for quantized weights are fewer than after reading."""
    if isinstance(info, TensorInfo):
        return info.nbytes
    parts = (getattr(info, name, None) for name in ("weight", "scale", "blocks", "scales"))
    return sum(part.nbytes for part in parts if part is not None)


def _describe(conversion: Conversion, request: Request, result: ConversionPlan) -> None:
    plans = conversion.file_plans(request.destination or conversion.source.path)
    result.written_bytes = conversion.nbytes
    result.files = {name: plan.nbytes for name, plan in plans.items()}
    if isinstance(conversion.target, McaLayout):
        result.stages = list(plan_stages(conversion.target, result.files))
        _ = conversion.target.manifest_tensors  # takes its memory, as in the conversion itself
    buffers = _buffer_bytes(conversion, request.limits)
    result.peak_bytes = _anonymous_bytes() + _WORK_BYTES + buffers
    if fault := too_many_files(conversion.open_files):
        result.refusals.append(fault)


def _buffer_bytes(conversion: Conversion, limits: Limits) -> int:
    """Return the bytes of the threads' buffers, as far as fills use them."""
    largest: dict[str, int] = {}
    chunking, tile = Chunking(limits.buffer_bytes), 0
    seen: dict[tuple[int, int, int], tuple[int, int]] = {}
    computed = 0
    for fill in conversion.fills:
        key = id(fill.gather), fill_item_size(fill), band_elements(fill)
        if key not in seen:
            seen[key] = _largest_chunk(chunking.chunks(fill))
        elements, scratch = seen[key]
        sizes = {
            name: count * ITEM_SIZES[fill.source_dtype]
            for name, count in (("out", elements), ("scratch", scratch))
        }
        if fill.dtype != fill.source_dtype:
            sizes["cast"] = elements * ITEM_SIZES[fill.dtype]
        for name, nbytes in sizes.items():
            largest[name] = max(largest.get(name, 0), nbytes)
        if fill.scales is not None:
            tile = TILE_BYTES
        computed = max(computed, _computed_bytes(fill, limits))
    return limits.workers * (sum(largest.values()) + computed + tile + _THREAD_BYTES)


def _largest_chunk(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Return the most elements of one of ``chunks``, and of a move that uses the scratch buffer."""
    moves = (move for chunk in chunks for move in chunk.moves)
    scratch = (move.run * move.repeat for move in moves if move.reads_in_order and not move.writes_in_order)
    return max((chunk.stop - chunk.start for chunk in chunks), default=0), max(scratch, default=0)


def _computed_bytes(fill: Fill, limits: Limits) -> int:
    """Return the bytes for dequantizing the parts of ``fill``."""
    sizes = [computed_bytes(part) for part in fill.parts if not isinstance(part.info, TensorInfo)]
    kept = sum(size for size in sizes if size <= limits.computed_bytes)
    return kept + (_COMPUTE_BYTES if sizes else 0)


def _forecast_adapter(request: Request, path: Path) -> ConversionPlan:
    """Plan the conversion of the adapter in ``path``, without writing anything."""
    from_mca = is_mca_adapter(path)
    target = conversion_target(request, from_megatron=from_mca)
    result = ConversionPlan(source=str(path), target=target, workers=1)
    kind = result._attempt(lambda: checkpoint_kind(path))
    result.kind = kind.value if kind is not None else ""
    result._attempt(lambda: require_adapter(path))
    _check_destination(request, result)
    adapter = None if result.kind == "" else result._attempt(lambda: _open_adapter(request, path))
    if adapter is None:
        return result
    result._attempt(lambda: side_files(path))
    _count_adapter(adapter, result)
    written = cast_adapter(adapter, request.cast) if request.cast else adapter
    if not request.cast and (counts := adapter.not_finite()):  # its tensors are read in any case
        result.notes.append(f"{path}: {named_counts(counts)}; they are copied as they are")
    if target == "hf":
        result._attempt(lambda: _as_peft(written, result))
    else:
        source_layout = adapter.model.layout if from_mca else ParallelLayout()
        result._attempt(lambda: _as_mca(written, target_layout(request.layout, source_layout), result))
    # the full adapter is in memory twice, as read and as written
    result.peak_bytes = _anonymous_bytes() + result.written_bytes
    sizes = [*result.files.values(), len(adapter.config.to_json())]
    _require_space(request.destination, lambda: bytes_on_disk(sizes, path), result)
    return result


def _open_adapter(request: Request, path: Path) -> Adapter:
    return open_adapter(path, None if request.checkpoint is None else load_model_config(request.checkpoint))


def _count_adapter(adapter: Adapter, result: ConversionPlan) -> None:
    result.model_type = adapter.model.model_type
    result.tensors = len({name for param in adapter.params for name in param.hf_names()})
    wholes = [adapter.read(param) for param in adapter.params]
    result.parameters = sum(whole.size for whole in wholes)
    result.read_bytes = sum(whole.nbytes for whole in wholes)


def _as_peft(adapter: Adapter, result: ConversionPlan) -> None:
    tensors = PeftTensors(adapter)
    arrays = {name: tensors.array(name) for name in sorted(tensors.sources)}
    specs = [(name, dtype_code(x.dtype), tuple(x.shape)) for name, x in arrays.items()]
    result.written_bytes = sum(x.nbytes for x in arrays.values())
    result.files = {WEIGHTS: plan_file(Path(WEIGHTS), specs, METADATA).nbytes}


def _as_mca(adapter: Adapter, layout: ParallelLayout, result: ConversionPlan) -> None:
    result.layout, result.layout_sizes = str(layout), asdict(layout)
    cut = with_layout(adapter, layout)
    wholes = {param.mca_name(): tuple(cut.read(param).shape) for param in cut.params}
    result.refusals += (faults := layout_faults(cut.params, cut.model, wholes))
    if faults:
        return
    plan = plan_adapter(cut)
    folder = Path(iteration_name(1))
    result.files = {name: plan_file(folder / name, plan.specs(name)).nbytes for name in plan.files}
    result.written_bytes = sum(result.files.values())
    result.stages = list(plan_stages(plan, result.files))


def plan_stages(target: McaLayout, sizes: dict[str, int]) -> Iterator[PlannedStage]:
    """Yield the contents of each pipeline rank; ``sizes`` are those of the target's files."""
    plan = target.config.pipeline_plan()
    by_stage: dict[str, list[str]] = {}
    for name in sorted(target.files):
        by_stage.setdefault(name.partition("/")[0], []).append(name)
    for rank in range(target.config.layout.pp):
        files = by_stage.get(f"pp_{rank:03d}", [])
        params = {param.mca_name() for name in files for param, _ in target.files[name]}
        dense = [sizes[name] for name in files if "/tp_" in name]
        experts = [sizes[name] for name in files if "/ep_" in name]
        chunks = plan.chunks[rank]
        yield PlannedStage(
            rank=rank,
            holds="; ".join(map(str, chunks)),
            layers=plan.rank_layers(rank),
            prediction_layers=tuple(layer for chunk in chunks for layer in chunk.mtp_layers),
            has_embedding=any(chunk.has_embedding for chunk in chunks),
            has_loss=any(chunk.has_loss for chunk in chunks),
            tensors=len(params),
            dense_bytes=max(dense, default=0),
            expert_bytes=max(experts, default=0),
        )


def _check_destination(request: Request, result: ConversionPlan) -> None:
    """Record whether the destination exists, is inside a source, or cannot be written."""
    destination = request.destination
    if destination is not None:
        sources = filter(None, (request.adapter, request.checkpoint))
        result._attempt(partial(require_free_destination, sources, destination, overwrite=request.overwrite))
        result._attempt(partial(_require_writable, destination))


def _anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def _require_writable(destination: Path) -> None:
    """Raise `McaError` if no directory can be created at ``destination``."""
    parent = _existing_parent(destination)
    if not parent.is_dir():
        raise McaError(f"--output_path {destination}: {parent} is not a directory; name another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise McaError(f"--output_path {destination}: {parent} cannot be written to; name another path")


def _existing_parent(destination: Path) -> Path:
    """Return the nearest existing parent of the directory for the files."""
    parent = staging_parent(destination)
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return parent


def _require_space(destination: Path | None, size: Callable[[], int], result: ConversionPlan) -> None:
    """Record an error if the disk has too little free space."""
    if destination is None:
        return
    parent, needed = result._attempt(lambda: _existing_parent(destination)), result._attempt(size)
    if parent is None or needed is None:
        return
    free = shutil.disk_usage(parent).free
    if free < needed:
        result.refusals.append(
            f"--output_path {destination}: needs {format_size(needed)}, {parent} has "
            f"{format_size(free)} free; free space or name another path"
        )
