"""Plan of a conversion of a model or a LoRA adapter: its files, sizes, memory and errors; nothing is written."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from mca_models.checkpoint.hf_directory import ConfigOnlySource, StoredTensor, has_weights
from mca_models.checkpoint.hf_writer import METADATA
from mca_models.checkpoint.mca_directory import McaLayout, is_mca, iteration_name, layout_faults, load_config
from mca_models.checkpoint.side_files import side_files
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind, load_model_config, open_checkpoint
from mca_models.lora import (
    Adapter,
    MergedSource,
    PeftTensors,
    cast_adapter,
    is_mca_adapter,
    open_adapter,
    plan_adapter,
    with_layout,
)
from mca_models.lora.config import FILE_NAME
from mca_models.lora.peft_directory import WEIGHTS
from mca_models.quantization.fp8 import TILE_BYTES
from mca_models.storage.atomic import staging_parent
from mca_models.storage.dtypes import ITEM_SIZES, dtype_code
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import TensorInfo, plan_file
from mca_models.storage.source import ModelSource
from mca_models.storage.values import named_counts

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


def forecast(request: Request) -> ConversionPlan:
    """Plan ``request`` as far as possible, without writing anything."""
    if request.adapter is not None and not request.merge:
        return _AdapterForecast(request, request.adapter).run()
    return _ModelForecast(request).run()


class _Forecast:
    """A plan in the making. An error of one step is recorded, and the steps that do not need its result go on."""

    def __init__(self, request: Request, plan: ConversionPlan) -> None:
        self.request, self.plan = request, plan

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of ``step``; on an error record it and return None."""
        try:
            return step()
        except McaError as error:
            reason = str(error)
        except OSError as error:
            what = error.strerror or str(error)
            reason = what if error.filename is None else f"{error.filename}: {what}"
        if reason not in self.plan.refusals:
            self.plan.refusals.append(reason)
        return None

    def check_destination(self) -> None:
        """Record whether the destination exists, is inside a source, or cannot be written."""
        destination, overwrite = self.request.destination, self.request.overwrite
        if destination is not None:
            sources = filter(None, (self.request.adapter, self.request.checkpoint))
            self.attempt(lambda: require_free_destination(sources, destination, overwrite=overwrite))
            self.attempt(lambda: _require_writable(destination))

    def check_space(self, size: Callable[[], int]) -> None:
        """Record an error if the disk has less free space than ``size``."""
        destination = self.request.destination
        if destination is None:
            return
        parent, needed = self.attempt(lambda: _existing_parent(destination)), self.attempt(size)
        if parent is None or needed is None:
            return
        free = shutil.disk_usage(parent).free
        if free < needed:
            self.plan.refusals.append(
                f"--output_path {destination}: needs {format_size(needed)}, {parent} has "
                f"{format_size(free)} free; free space or name another path"
            )

    def describe_layout(self, layout: ParallelLayout) -> None:
        """Add the layout of an MCA target."""
        self.plan.layout, self.plan.layout_sizes = str(layout), asdict(layout)


class _ModelForecast(_Forecast):
    """Plan of the conversion of a model."""

    def __init__(self, request: Request) -> None:
        self.path = request.require_checkpoint()
        plan = ConversionPlan(
            source=str(self.path), target=request.to or "mca", workers=request.limits.workers
        )
        super().__init__(request, plan)

    def run(self) -> ConversionPlan:
        """Return the plan."""
        kind = self.attempt(lambda: checkpoint_kind(self.path))
        if kind is not None:
            self.plan.kind = kind.value
            self.plan.target = conversion_target(self.request, from_megatron=kind.is_megatron)
        self.check_destination()
        source = None if kind is None else self._open(kind)
        if source is None:
            return self.plan
        conversion = self._plan_conversion(source)
        if conversion is not None:
            self._describe(conversion)
            self.check_space(lambda: conversion.disk_bytes)
            if not self.plan.config_only:
                self._report_values(conversion)
        return self.plan

    def _open(self, kind: CheckpointKind) -> ModelSource | None:
        """Open the source, with the adapter merged in if there is one."""
        source, adapter = self._open_checkpoint(kind), self.request.adapter
        if source is None or adapter is None:
            return source
        return self.attempt(
            lambda: MergedSource(source, open_adapter(adapter, source.config), self.request.cast)
        )

    def _open_checkpoint(self, kind: CheckpointKind) -> ModelSource | None:
        """Open the checkpoint, or its configuration alone if that fails, for a partial plan."""
        if kind is CheckpointKind.HF and not has_weights(self.path):
            self.plan.notes.append(
                "there is only a config.json: sizes are computed from it, and no file was checked"
            )
            return self._open_config()
        source = self.attempt(lambda: open_checkpoint(self.path, self.request.cast))
        if source is None:
            return None if kind.is_adapter else self._open_config()
        self.attempt(source.check_duplicates)
        self.attempt(lambda: side_files(self.path))
        return source

    def _open_config(self) -> ModelSource | None:
        """Return a source with names, dtypes and shapes from the configuration."""
        self.plan.config_only = True
        known_errors = list(self.plan.refusals)
        config = self.attempt(lambda: load_config(self.path)) if is_mca(self.path) else None
        if is_mca(self.path) and config is None:
            return None
        source = self.attempt(lambda: ConfigOnlySource(self.path, config, self.request.cast))
        if known_errors:  # the checkpoint could not be opened, which reported the configuration's errors too
            self.plan.refusals = known_errors
        return source

    def _plan_conversion(self, source: ModelSource) -> Conversion | None:
        """Describe the source and plan its conversion; None: it cannot be converted."""
        plan, request = self.plan, self.request
        layout = self.attempt(lambda: target_layout(request.layout, source.config.layout))
        plan.model_type = source.config.model_type
        plan.tensors = len({name for param in source.params for name in param.hf_names()})
        plan.parameters = sum(prod(source.full_shape(param)) for param in source.params)
        plan.read_bytes = sum(_stored_bytes(info) for info in source.tensors())
        faults = list(dtype_faults(source))
        if layout is not None and plan.target == "mca":
            self.describe_layout(layout)
            wholes = {param.mca_name(): source.full_shape(param) for param in source.params}
            faults += layout_faults(source.params, replace(source.config, layout=layout), wholes)
        plan.refusals += faults
        if faults:
            return None
        if plan.target == "hf":
            return self.attempt(
                lambda: plan_to_hf(source, request.cast, request.max_shard_bytes, fp8=request.fp8)
            )
        if layout is None:
            return None
        return self.attempt(lambda: plan_to_mca(source, layout, request.cast))

    def _describe(self, conversion: Conversion) -> None:
        """Add the files that the conversion writes, and its memory."""
        plan = self.plan
        file_plans = conversion.file_plans(self.request.destination or conversion.source.path)
        plan.written_bytes = conversion.nbytes
        plan.files = {name: file.nbytes for name, file in file_plans.items()}
        if isinstance(conversion.target, McaLayout):
            plan.stages = list(plan_stages(conversion.target, plan.files))
            _ = conversion.target.manifest_tensors  # takes its memory, as in the conversion itself
        buffers = _buffer_bytes(conversion, self.request.limits)
        plan.peak_bytes = _anonymous_bytes() + _WORK_BYTES + buffers
        if fault := too_many_files(conversion.open_files):
            plan.refusals.append(fault)

    def _report_values(self, conversion: Conversion) -> None:
        """Report values that are not finite, also after the cast, with ``--values``; else how to find them."""
        plan, request, source = self.plan, self.request, conversion.source
        notes = Notes(source, conversion.fills)
        if not request.values:
            if notes.work is not None:
                plan.notes.append(
                    "no value was read; the conversion fails if one is not finite in the target; --values reads them"
                )
            return
        casts = notes.casts()
        found = self.attempt(
            lambda: search(source, source.params, request.limits, casts=casts, checksums=True)
        )
        if not found:
            return
        if notes.work is None:
            plan.notes.append(non_finite_warning(source.path, count_by_name(found)))
        else:
            plan.refusals += [str(non_finite_error(one, notes.work, request.cast or "")) for one in found]


class _AdapterForecast(_Forecast):
    """Plan of the conversion of a LoRA adapter."""

    def __init__(self, request: Request, path: Path) -> None:
        self.path, self.from_mca = path, is_mca_adapter(path)
        target = conversion_target(request, from_megatron=self.from_mca)
        super().__init__(request, ConversionPlan(source=str(path), target=target, workers=1))
        self._small: list[int] = []
        """Sizes of the files of an MCA directory next to those of the adapter and its configuration."""

    def run(self) -> ConversionPlan:
        """Return the plan."""
        plan, path, cast = self.plan, self.path, self.request.cast
        kind = self.attempt(lambda: checkpoint_kind(path))
        plan.kind = kind.value if kind is not None else ""
        self.attempt(lambda: require_adapter(path))
        self.check_destination()
        adapter = None if kind is None else self.attempt(self._open)
        if adapter is None:
            return plan
        self.attempt(lambda: side_files(path))
        self._count(adapter)
        written = cast_adapter(adapter, cast) if cast else adapter
        if not cast and (counts := adapter.not_finite()):  # its tensors are read in any case
            plan.notes.append(f"{path}: {named_counts(counts)}; they are copied as they are")
        self.attempt(lambda: self._plan_peft(written) if plan.target == "hf" else self._plan_mca(written))
        # the full adapter is in memory twice, as read and as written
        plan.peak_bytes = _anonymous_bytes() + plan.written_bytes
        sizes = [*plan.files.values(), *self._small, len(adapter.config.to_json())]
        self.check_space(lambda: bytes_on_disk(sizes, path, [FILE_NAME]))
        return plan

    def _open(self) -> Adapter:
        base = self.request.checkpoint
        return open_adapter(self.path, None if base is None else load_model_config(base))

    def _count(self, adapter: Adapter) -> None:
        self.plan.model_type = adapter.model.model_type
        self.plan.tensors = len({name for param in adapter.params for name in param.hf_names()})
        wholes = [adapter.read(param) for param in adapter.params]
        self.plan.parameters = sum(whole.size for whole in wholes)
        self.plan.read_bytes = sum(whole.nbytes for whole in wholes)

    def _plan_peft(self, adapter: Adapter) -> None:
        tensors = PeftTensors(adapter)
        arrays = {name: tensors.array(name) for name in sorted(tensors.sources)}
        specs = [(name, dtype_code(x.dtype), tuple(x.shape)) for name, x in arrays.items()]
        self.plan.written_bytes = sum(x.nbytes for x in arrays.values())
        self.plan.files = {WEIGHTS: plan_file(Path(WEIGHTS), specs, METADATA).nbytes}

    def _plan_mca(self, adapter: Adapter) -> None:
        source_layout = adapter.model.layout if self.from_mca else ParallelLayout()
        layout = target_layout(self.request.layout, source_layout)
        self.describe_layout(layout)
        cut = with_layout(adapter, layout)
        wholes = {param.mca_name(): tuple(cut.read(param).shape) for param in cut.params}
        faults = layout_faults(cut.params, cut.model, wholes)
        self.plan.refusals += faults
        if faults:
            return
        target = plan_adapter(cut)
        folder = Path(iteration_name(1))
        self.plan.files = {name: plan_file(folder / name, target.specs(name)).nbytes for name in target.files}
        self.plan.written_bytes = sum(self.plan.files.values())
        records = {name: FileRecord(size, 0) for name, size in self.plan.files.items()}
        self._small = [len(content) for content in target.small_files(records).values()]
        self.plan.stages = list(plan_stages(target, self.plan.files))


def _stored_bytes(info: StoredTensor) -> int:
    """Return the bytes on disk, which for quantized weights are fewer than after reading."""
    if isinstance(info, TensorInfo):
        return info.nbytes
    parts = (getattr(info, name, None) for name in ("weight", "scale", "blocks", "scales"))
    return sum(part.nbytes for part in parts if part is not None)


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
