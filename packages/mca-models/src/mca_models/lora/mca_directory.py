"""MCA adapter directory: the tree of an MCA checkpoint and PEFT's ``adapter_config.json``.

    <dir>/mca_config.json          the base model and the layout of the pieces
          adapter_config.json      PEFT's, verbatim
          latest_checkpointed_iteration.txt
          iter_0000001/manifest.json, pp_000/tp_00.safetensors, pp_000/ep_000_etp_00.safetensors, ...

Every piece is stored once, as in a checkpoint of weights.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import has_entry, resolve_inside
from mca_config.layout import ParallelLayout
from mca_config.model_config import FILE_NAME as MODEL
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.mca_directory import McaLayout, iteration_name, latest_iteration, load_config
from mca_models.checkpoint.placement import shard_count, shard_files
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.lora.adapter import Adapter, check_shapes
from mca_models.lora.config import FILE_NAME, AdapterConfig
from mca_models.lora.rules import rules_from_names
from mca_models.storage.atomic import atomic_directory, write_file
from mca_models.storage.copy_plan import Side
from mca_models.storage.dtypes import dtype_code
from mca_models.storage.manifest import FILE_NAME as MANIFEST
from mca_models.storage.manifest import FileRecord, Manifest
from mca_models.storage.safetensors import TensorInfo, plan_file, read_header
from mca_models.storage.source import Part, checked_parts, require_full_shape, require_same_names
from mca_models.storage.writer import SafetensorsWriter, file_crc32
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import Array


def is_mca_adapter(path: Path) -> bool:
    """Return whether ``path`` looks like an MCA adapter directory."""
    return has_entry(path, FILE_NAME) and has_entry(path, MODEL)


def open_mca_adapter(path: Path) -> Adapter:
    """Return the adapter in ``path``.

    Raises:
        McaError: Files or tensors are missing, unexpected, damaged or of another shape.
    """
    model, config = load_config(path), AdapterConfig.load(path)
    folder = path / iteration_name(latest_iteration(path))
    manifest = Manifest.load(folder)
    rules = rules_from_names(model, config, manifest.tensors.keys())
    names = (param.mca_name() for param in rules.params)
    require_same_names(manifest.tensors.keys(), names, folder, f"{MANIFEST} and {FILE_NAME}")
    shards = _Shards(folder, manifest, model)
    return check_shapes(Adapter(model, config, rules, shards.read, shards.parts), folder)


def stored_names(path: Path) -> Collection[str]:
    """The canonical names of the tensors of the adapter in ``path``."""
    return Manifest.load(path / iteration_name(latest_iteration(path))).tensors.keys()


class _Shards:
    """Reader that joins the shards of a tree."""

    def __init__(self, folder: Path, manifest: Manifest, model: McaModelConfig) -> None:
        self._folder, self._manifest, self._model = folder, manifest, model
        self._plan = model.pipeline_plan()
        self._headers: Mapping[str, Mapping[str, TensorInfo]] = {
            name: self._header(name, record) for name, record in manifest.files.items()
        }

    def _header(self, name: str, record: FileRecord) -> Mapping[str, TensorInfo]:
        file = resolve_inside(self._folder.parent, f"{self._folder.name}/{name}")
        tensors = read_header(file).tensors
        if file.stat().st_size != record.nbytes:
            raise McaError(f"{file}: has {file.stat().st_size} bytes, the manifest says {record.nbytes}")
        if file_crc32(file) != record.crc32:  # adapters are small
            raise McaError(f"{file}: its checksum is not the manifest's; the file is damaged")
        return tensors

    def read(self, param: Param) -> Array:
        whole = param.shard.join([info.array() for info in self._infos(param)])
        return whole[: self._manifest.tensors[param.mca_name()].shape[0]] if param.vocab else whole

    def parts(self, param: Param) -> tuple[Side, tuple[Part, ...]]:
        side, whole = shard_count(param, self._model.layout), full_shape(param, self._model)
        require_full_shape(param, self._manifest.tensors[param.mca_name()].shape, self._model, self._folder)
        return side, checked_parts(param, whole, side, self._infos(param), self._model.num_experts or 1)

    def _infos(self, param: Param) -> list[TensorInfo]:
        name = param.mca_name()
        files = shard_files(param, self._model, self._plan)
        if self._manifest.tensors[name].files != files:
            raise McaError(f"{self._folder}: the manifest does not place {name} as its layout demands")
        missing = [file for file in files if name not in self._headers.get(file, ())]
        if missing:
            raise McaError(f"{self._folder / missing[0]}: holds no {name}")
        return [self._headers[file][name] for file in files]


def write_mca_adapter(
    adapter: Adapter,
    layout: ParallelLayout,
    destination: Path,
    *,
    side_files: Path | None = None,
    overwrite: bool = False,
    proceed: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write ``adapter`` sharded for ``layout``.

    Args:
        adapter: What to write.
        layout: The parallel sizes of the ranks that will read it.
        destination: The directory; absent or empty, unless overwritten.
        side_files: Where small files (tokenizer, model card) are copied from.
        overwrite: Replace an existing ``destination``.
        proceed: Called with the written directory before it is put in place; raises to stop.
    """
    import numpy as np

    adapter = with_layout(adapter, layout)
    plan = plan_adapter(adapter)
    with atomic_directory(destination, overwrite=overwrite, proceed=proceed) as folder:
        records = {}
        for file, pieces in plan.files.items():
            target = plan_file(folder / iteration_name(1) / file, plan.specs(file))
            with SafetensorsWriter(target) as writer:
                for param, rank in pieces:
                    piece = adapter.piece(param, rank, shard_count(param, layout))
                    writer.write(param.mca_name(), np.ascontiguousarray(piece))
            records[file] = writer.record
        if side_files is not None:
            copy_side_files(side_files, folder)
        write_file(folder / FILE_NAME, adapter.config.to_json().encode())
        plan.finish(folder, records)


def plan_adapter(adapter: Adapter) -> McaLayout:
    """The files and tensors of an MCA directory of ``adapter``, in the layout of its model.

    Raises:
        McaError: The layout does not divide it.
    """
    wholes = {param.mca_name(): adapter.read(param) for param in adapter.params}
    return McaLayout(
        adapter.params,
        adapter.model,
        {name: dtype_code(x.dtype) for name, x in wholes.items()},
        {name: tuple(x.shape) for name, x in wholes.items()},
    )


def with_layout(adapter: Adapter, layout: ParallelLayout) -> Adapter:
    """``adapter`` with the rules that another layout needs; its tensors are the same."""
    model = replace(adapter.model, layout=layout)
    by_name = {param.mca_name(): param for param in adapter.params}
    names = {*by_name, *(name for param in adapter.params for name in param.hf_names())}
    rules = rules_from_names(model, adapter.config, names)
    return Adapter(model, adapter.config, rules, lambda param: adapter.read(by_name[param.mca_name()]))
