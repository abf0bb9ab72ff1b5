"""Forecast of the conversion of a LoRA adapter; `model` has that of a model."""

from dataclasses import asdict
from pathlib import Path

from mca_config.layout import ParallelLayout
from mca_convert.conversion import require_adapter
from mca_convert.forecast.outcome import Forecast, Request, anonymous_bytes, check_destination, require_space
from mca_convert.forecast.stages import plan_stages
from mca_models.checkpoint.hf_writer import METADATA
from mca_models.checkpoint.mca_directory import iteration_name, layout_faults
from mca_models.checkpoint.side_files import side_files
from mca_models.checkpoint_kinds import checkpoint_kind
from mca_models.lora import (
    Adapter,
    PeftTensors,
    cast_adapter,
    is_mca_adapter,
    load_model_config,
    open_adapter,
    plan_adapter,
    with_layout,
)
from mca_models.lora.peft_directory import WEIGHTS
from mca_models.storage.dtypes import dtype_code
from mca_models.storage.finite import named_counts
from mca_models.storage.safetensors import plan_file


def forecast_adapter(request: Request, path: Path) -> Forecast:
    """Plan the conversion of the adapter in ``path``, without writing anything."""
    from_mca = is_mca_adapter(path)
    target = request.target or ("hf" if from_mca else "mca")
    result = Forecast(str(path), target, workers=1)
    kind = result.attempt(lambda: checkpoint_kind(path))
    result.kind = kind.value if kind is not None else ""
    result.attempt(lambda: require_adapter(path))
    check_destination(request, result)
    arguments = result.attempt(request.arguments)
    adapter = None if result.kind == "" else result.attempt(lambda: _open(request, path))
    if adapter is None:
        return result
    result.attempt(lambda: side_files(path))
    _count(adapter, result)
    written = cast_adapter(adapter, request.cast) if request.cast else adapter
    if not request.cast and (counts := adapter.not_finite()):  # its tensors are read in any case
        result.notes.append(f"{path}: {named_counts(counts)}; they are copied as they are")
    if target == "hf":
        result.attempt(lambda: _as_peft(written, result))
    elif arguments is not None:
        source_layout = adapter.model.layout if from_mca else ParallelLayout()
        result.attempt(lambda: _as_mca(written, arguments.layout(source_layout), result))
    # the full adapter is in memory twice, as read and as written
    result.peak_bytes = anonymous_bytes() + result.written_bytes
    require_space(request.destination, result)
    return result


def _open(request: Request, path: Path) -> Adapter:
    return open_adapter(path, None if request.path is None else load_model_config(request.path))


def _count(adapter: Adapter, result: Forecast) -> None:
    result.model_type = adapter.model.model_type
    result.tensors = len({name for param in adapter.params for name in param.hf_names()})
    wholes = [adapter.read(param) for param in adapter.params]
    result.parameters = sum(whole.size for whole in wholes)
    result.read_bytes = sum(whole.nbytes for whole in wholes)


def _as_peft(adapter: Adapter, result: Forecast) -> None:
    tensors = PeftTensors(adapter)
    arrays = {name: tensors.array(name) for name in sorted(tensors.sources)}
    specs = [(name, dtype_code(x.dtype), tuple(x.shape)) for name, x in arrays.items()]
    result.written_bytes = sum(x.nbytes for x in arrays.values())
    result.files = {WEIGHTS: plan_file(Path(WEIGHTS), specs, METADATA).nbytes}


def _as_mca(adapter: Adapter, layout: ParallelLayout, result: Forecast) -> None:
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
