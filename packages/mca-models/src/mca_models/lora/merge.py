"""Folding an adapter into the weights: ``W + scale * lora_B @ lora_A``, in fp32, then W's own dtype.

That is what ``merge_and_unload`` computes. PEFT rounds the product of *stacked* experts to W's dtype
before it adds; here everything is rounded once. Rows are done in blocks, so beyond the tensor itself only
a few megabytes are held.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.atomic import atomic_directory
from mca_models.checkpoint.dtypes import DTYPE_NAMES, numpy_dtype
from mca_models.checkpoint.hf_writer import MAX_SHARD_BYTES, METADATA, HfLayout
from mca_models.checkpoint.moves import HF
from mca_models.checkpoint.safetensors import plan_file
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.checkpoint.source import ModelSource, copy_move
from mca_models.checkpoint.writer import SafetensorsWriter
from mca_models.foreign.fp8 import cast_to
from mca_models.lora.adapter import Adapter, require_untied
from mca_models.lora.rules import Factors
from mca_models.weights import Param

_BLOCK = 1 << 20
"""Elements of fp32 work at a time: 4 MiB."""


class Merge:
    """What an adapter does to the tensors of a HF model.

    Args:
        adapter: The adapter; its model need not have the layout of the weights.

    Raises:
        McaError: The merged model could not be written with the base model's tensors.
    """

    def __init__(self, adapter: Adapter) -> None:
        require_untied(adapter, "merging")
        self.adapter = adapter

    def touches(self, param: Param) -> bool:
        """Whether the HF tensors of base parameter ``param`` change."""
        name = param.mca_name()
        return name in self.adapter.factors_of or name in self.adapter.saved_of

    def merge(self, param: Param, part: int, weight: Any) -> Any:
        """HF tensor ``param.hf[part]`` (an expert's own entry of a stacked one) after merging.

        Args:
            param: The base parameter's rule.
            part: Which of its HF tensors.
            weight: That tensor; it is changed in place if it can be written to.
        """
        import numpy as np

        name = param.mca_name()
        if name in self.adapter.saved_of:
            saved = self.adapter.saved_of[name]
            weight = np.array(saved.from_whole(self.adapter.read(saved))[part]).astype(weight.dtype)
        for pair, b, rows in self._on_part(param, part):
            weight = weight if weight.flags.writeable else weight.copy()
            changed = weight.T if pair.target.transposed else weight
            if not add_product(changed[rows], self.adapter.read(pair.a), b, pair.scale):
                raise McaError(
                    f"{param.hf_names()[part]}: merging gives values that are not finite in {weight.dtype}; the "
                    "adapter is broken or its scale too large"
                )
        return weight

    def _on_part(self, param: Param, part: int) -> Iterator[tuple[Factors, Any, slice]]:
        """The factors on one HF tensor, the rows of lora_B that matter, and the rows that they change.

        Adapter and base may see the experts otherwise: each module its own tensor, or gate and up in one.
        """
        for pair in self.adapter.factors_of.get(param.mca_name(), ()):
            b = pair.b.from_whole(self.adapter.read(pair.b))[0]
            mine, its = len(param.hf), len(pair.target.base.hf)
            if mine == its:
                if pair.target.part == part:
                    yield pair, b, slice(None)
            elif mine == 1:  # the adapter's parts are rows of this one tensor
                yield pair, b, slice(pair.target.part * len(b), (pair.target.part + 1) * len(b))
            else:  # this tensor is some rows of the adapter's one
                rows = len(b) // mine
                yield pair, b[part * rows : (part + 1) * rows], slice(None)


def add_product(weight: Any, a: Any, b: Any, scale: float) -> bool:
    """``weight += scale * b @ a`` in place, each element rounded once; whether all results are finite."""
    import numpy as np

    finite = True
    columns, rows = a.astype(np.float32), max(1, _BLOCK // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        block = slice(start, start + rows)
        with np.errstate(over="ignore", invalid="ignore"):  # told by the result
            delta = b[block].astype(np.float32) @ columns
            delta *= np.float32(scale)
            delta += weight[block].astype(np.float32)
            weight[block] = delta.astype(weight.dtype)
        # NumPy knows float16; bfloat16 has float32's range
        finite = finite and bool(np.isfinite(weight[block] if weight.dtype == np.float16 else delta).all())
    return finite


def merge_to_hf(
    base: ModelSource,
    adapter: Adapter,
    destination: Path,
    *,
    cast: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the HF directory of ``base`` with ``adapter`` folded in.

    Args:
        base: A checkpoint of any kind, opened.
        adapter: An adapter of that model.
        destination: The directory; must be absent or empty.
        cast: Safetensors code (``BF16``, ``F16``, ``F32``) that weights are written in; None: their own.
        max_shard_bytes: Size limit of one file's tensors.

    Raises:
        McaError: The adapter does not fit, or a merged or cast weight is not finite.
    """
    merge, params = Merge(adapter), list(base.params)
    _require_all(merge, params)
    dtypes = {param.mca_name(): _dtype(base, param, cast) for param in params}
    config: McaModelConfig = replace(base.config, dtype=DTYPE_NAMES[cast]) if cast else base.config  # type: ignore[arg-type]
    wholes = {param.mca_name(): base.whole_shape(param) for param in params}
    layout = HfLayout(params, config, dtypes, wholes, max_shard_bytes)
    with atomic_directory(destination) as folder:
        for file in layout.files:
            with SafetensorsWriter(plan_file(folder / file, layout.specs(file), METADATA)) as writer:
                _write_file(writer, layout, file, merge, base)
        copy_side_files(base.path, folder)
        layout.finish(folder)


def _dtype(base: ModelSource, param: Param, cast: str | None) -> str:
    own = base.parts(param)[0].info.dtype
    return cast if cast and own in DTYPE_NAMES and not param.keep_fp32 else own


def _require_all(merge: Merge, params: list[Param]) -> None:
    known = {param.mca_name() for param in params}
    lost = sorted({*merge.adapter.factors_of, *merge.adapter.saved_of} - known)
    if lost:
        raise McaError(f"the adapter changes {lost[0]}, which the base model does not have")


def _write_file(
    writer: SafetensorsWriter, layout: HfLayout, file: str, merge: Merge, base: ModelSource
) -> None:
    """Writes every tensor of ``file``: a stacked one expert by expert."""
    wanted = set(layout.files[file])
    copies: dict[str, list[str]] = {}
    for copy, original in layout.duplicates.items():
        copies.setdefault(original, []).append(copy)
    for param in layout.params:
        for part, name in enumerate(param.hf_names()):
            targets = [target for target in (name, *copies.get(name, ())) if target in wanted]
            if not targets:
                continue
            data = _merged(merge, base, param, part, layout.tensors[name][0])
            start = (param.expert or 0) * data.nbytes if param.stacked else 0
            for target in targets:
                writer.write(target, data.reshape(-1).view("uint8"), start)


def _merged(merge: Merge, base: ModelSource, param: Param, part: int, code: str) -> Any:
    """HF tensor ``param.hf[part]`` after merging, in the dtype of safetensors ``code``."""
    import numpy as np

    weight, dtype = _read_part(base, param, part), numpy_dtype(code)
    if merge.touches(param):
        # a cast follows the sum, so that there too each element is rounded once
        weight = merge.merge(param, part, weight if weight.dtype == dtype else weight.astype(np.float32))
    if weight.dtype == dtype:
        return weight
    out = np.empty(weight.shape, dtype)
    cast_to(out, weight.astype(np.float32, copy=False), param.hf_names()[part])
    return out


def _read_part(base: ModelSource, param: Param, part: int) -> Any:
    import numpy as np

    gather, flats = base.gathers(param, HF)[part], [p.flat() for p in base.parts(param)]
    out = np.empty(gather.size, numpy_dtype(base.parts(param)[0].info.dtype))
    for start, stop in gather.zeros:
        out[start:stop] = 0
    for move in gather.moves:
        copy_move(flats[move.part], out, move)
    return out.reshape(gather.shape)
