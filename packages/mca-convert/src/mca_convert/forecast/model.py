"""Forecast of the conversion of a model; `adapter` has that of a LoRA adapter."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mca_config.layout import ParallelLayout
from mca_convert.chunks import Chunk
from mca_convert.collect import computed_bytes
from mca_convert.conversion import Conversion, plan_to_hf, plan_to_mca
from mca_convert.forecast.outcome import Forecast, Request, anonymous_bytes, check_destination, require_space
from mca_convert.forecast.stages import plan_stages
from mca_convert.non_finite import Notes, count_by_name, non_finite_error, non_finite_warning, search
from mca_convert.open_files import too_many_files
from mca_convert.pool import Limits
from mca_convert.tasks import Chunking, Fill, band_elements, dtype_faults, fill_item_size
from mca_models.checkpoint.config_only import ConfigOnlySource
from mca_models.checkpoint.hf_directory import StoredTensor, has_weights
from mca_models.checkpoint.mca_directory import McaLayout, is_mca, layout_faults, load_config
from mca_models.checkpoint.side_files import side_files
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind, open_checkpoint
from mca_models.quantization.fp8_tile import TILE_BYTES
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ModelSource

_THREAD_BYTES = 200 << 10  # a thread's stack and its share of the allocator
_COMPUTE_BYTES = 3 << 20  # of one thread, while it dequantises
_WORK_BYTES = 1 << 20  # temporary objects of a conversion


def forecast(request: Request) -> Forecast:
    """Plan ``request`` as far as possible, without writing anything."""
    if request.adapter is not None and not request.merge:
        from mca_convert.forecast.adapter import forecast_adapter

        return forecast_adapter(request, request.adapter)
    if request.path is None:
        raise ValueError("a checkpoint is needed unless an adapter is converted")
    path = request.path
    result = Forecast(str(path), request.target or "mca", workers=request.limits.workers)
    kind = result.attempt(lambda: checkpoint_kind(path))
    if kind is not None:
        result.kind = kind.value
        result.target = request.target or ("hf" if kind.is_megatron or request.merge else "mca")
    check_destination(request, result)
    arguments = result.attempt(request.arguments)
    source = None if kind is None else _open(path, request, kind, result)
    if source is not None and request.adapter is not None:
        source = _merged(source, request.adapter, request.cast, result)
    if source is None:
        return result
    base = source.config.layout
    layout = None if arguments is None else result.attempt(lambda: arguments.layout(base))
    conversion = _plan(request, source, layout, result)
    if conversion is not None:
        _describe(conversion, request, result)
        require_space(request.destination, result)
        if not result.config_only:
            _report_values(conversion, request, result)
    return result


def _merged(base: ModelSource, path: Path, cast: str | None, result: Forecast) -> ModelSource | None:
    from mca_models.lora import MergedSource, open_adapter

    return result.attempt(lambda: MergedSource(base, open_adapter(path, base.config), cast))


def _open(path: Path, request: Request, kind: CheckpointKind, result: Forecast) -> ModelSource | None:
    """Open the source; if that fails, return one from its configuration alone, for a partial forecast."""
    if kind is not CheckpointKind.HF or has_weights(path):
        source = result.attempt(lambda: open_checkpoint(path, request.cast))
        if source is not None:
            result.attempt(source.check_duplicates)
            result.attempt(lambda: side_files(path))
            return source
        if kind.is_adapter:
            return None
    else:
        result.notes.append(
            "there is only a config.json: sizes are computed from it, and no file was checked"
        )
    result.config_only = True
    seen = list(result.refusals)
    config = result.attempt(lambda: load_config(path)) if is_mca(path) else None
    if is_mca(path) and config is None:
        return None
    config_only = result.attempt(lambda: ConfigOnlySource(path, config, request.cast))
    if seen:
        result.refusals = seen  # the configuration's own faults were reported when it was opened
    return config_only


def _plan(
    request: Request, source: ModelSource, layout: ParallelLayout | None, result: Forecast
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
    if request.fp8 and result.target == "mca":
        result.refusals.append("--fp8 is for Hugging Face targets; remove it")
        return None
    if result.target == "hf":
        return result.attempt(
            lambda: plan_to_hf(source, request.cast, request.max_shard_bytes, fp8=request.fp8)
        )
    return result.attempt(lambda: plan_to_mca(source, layout or ParallelLayout(), request.cast))


def _report_values(conversion: Conversion, request: Request, result: Forecast) -> None:
    """Report values that are not finite, or not finite after the cast, with ``--values``; else how to find them."""
    notes = Notes(conversion.source, conversion.fills)
    if not request.values:
        if notes.work is not None:
            result.notes.append(
                "no value was read; the conversion fails if one is not finite in the target; --values reads them"
            )
        return
    source, casts = conversion.source, notes.casts()
    found = result.attempt(lambda: search(source, source.params, request.limits, casts=casts))
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


def _describe(conversion: Conversion, request: Request, result: Forecast) -> None:
    plans = conversion.file_plans(request.destination or conversion.source.path)
    result.written_bytes = conversion.nbytes
    result.files = {name: plan.nbytes for name, plan in plans.items()}
    if isinstance(conversion.target, McaLayout):
        result.stages = list(plan_stages(conversion.target, result.files))
        _ = conversion.target.manifest_tensors  # takes its memory, as in the conversion itself
    buffers = _buffer_bytes(conversion, request.limits)
    result.peak_bytes = anonymous_bytes() + _WORK_BYTES + buffers
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
