"""A merged model written by one thread and without a plan, to compare with what others compute."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.hf_writer import MAX_SHARD_BYTES, METADATA, HfLayout
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.lora import Adapter, MergedSource
from mca_models.lora.merge import fill
from mca_models.storage.atomic import atomic_directory
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import DTYPE_NAMES, numpy_dtype
from mca_models.storage.safetensors import plan_file
from mca_models.storage.source import ModelSource
from mca_models.storage.values import cast_into
from mca_models.storage.writer import SafetensorsWriter
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray, NumpyDtype


def merge_to_hf(
    base: ModelSource,
    adapter: Adapter,
    destination: Path,
    *,
    cast: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the HF directory of ``base`` with ``adapter`` folded in, cast to the dtype of code ``cast``."""
    source = MergedSource(base, adapter, cast)
    dtypes = {
        param.mca_name(): _cast_dtype(param, source.parts(param)[0].info.dtype, cast)
        for param in source.params
    }
    config: McaModelConfig = replace(source.config, dtype=DTYPE_NAMES[cast]) if cast else source.config  # type: ignore[arg-type]
    wholes = {param.mca_name(): source.full_shape(param) for param in source.params}
    layout = HfLayout(source.params, config, dtypes, wholes, max_shard_bytes)
    with atomic_directory(destination) as folder:
        for file in layout.files:
            with SafetensorsWriter(plan_file(folder / file, layout.specs(file), METADATA)) as writer:
                _write_file(writer, layout, file, source)
        copy_side_files(base.path, folder)
        layout.finish(folder)


def _cast_dtype(param: Param, own: str, cast: str | None) -> str:
    """The code that ``param``, stored as ``own``, is written in."""
    return cast if cast and own in DTYPE_NAMES and (cast == "F32" or not param.keep_fp32) else own


def _write_file(writer: SafetensorsWriter, layout: HfLayout, file: str, source: ModelSource) -> None:
    """Write every tensor of ``file``: a stacked one expert by expert."""
    wanted = set(layout.files[file])
    for param in layout.params:
        for number, name in enumerate(param.hf_names()):
            targets = [target for target in layout.written_as(name) if target in wanted]
            if not targets:
                continue
            data = _whole_tensor(source, param, number, numpy_dtype(layout.tensors[name][0]))
            start = (param.expert or 0) * data.nbytes if param.stacked else 0
            for target in targets:
                writer.write(target, data.view("uint8"), start)


def _whole_tensor(source: ModelSource, param: Param, number: int, dtype: NumpyDtype) -> NumpyArray:
    """HF tensor ``param.hf[number]``, flat."""
    gather, parts = source.gathers(param, HF)[number], source.parts(param)
    own = np.empty(gather.size, numpy_dtype(parts[0].info.dtype))
    fill(own, gather, parts)
    if own.dtype == dtype:
        return own
    out = np.empty(own.shape, dtype)
    cast_into(own, out, param.hf_names()[number])
    return out
