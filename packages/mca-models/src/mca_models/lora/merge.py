"""Folding an adapter into the weights: ``W + scale * lora_B @ lora_A``, in fp32 (fp64 if W is), then W's own dtype.

That is what ``merge_and_unload`` computes. PEFT rounds the product of *stacked* experts to W's dtype
before it adds; here everything is rounded once, also where W is cast. Rows are done in blocks that do not
depend on the caller, so a merged model is the same for every order and size of reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.placement import stored_params
from mca_models.lora.adapter import Adapter, require_untied
from mca_models.lora.rules import LoraFactors
from mca_models.storage.byte_ranges import Gather, Shape, clip
from mca_models.storage.copy_plan import HF, Rule, Side, part_shapes
from mca_models.storage.dtypes import DTYPE_NAMES, numpy_dtype
from mca_models.storage.lazy_tensor import LazyTensorBase
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import (
    ComputedTensor,
    ModelSource,
    Part,
    copy_move,
    param_part_shapes,
    plan_gathers,
)
from mca_models.storage.values import cast_into, counts_in, named_counts, non_finite
from mca_models.templates import get_family
from mca_models.templates.classification_head import SCORE, Head, label_names, with_head
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray, NumpyDtype

_BLOCK = 1 << 17
"""Elements of fp32 work at a time: 512 KiB."""


class MergedSource(ModelSource):
    """A checkpoint with an adapter folded in, whose changed tensors are computed as they are read.

    An adapter that was trained on a model with a head for scores holds that head itself: ``mca-train reward`` and
    ``classify`` train such adapters, and PEFT's ``SEQ_CLS`` and ``TOKEN_CLS`` are. The merged model has it too.

    Args:
        base: A checkpoint of any kind, opened.
        adapter: An adapter of that model; it need not have the layout of the weights.
        cast: Safetensors code that changed weights are read as (``BF16``, ``F16``, ``F32``); None: their own.

    Raises:
        McaError: The merged model could not be written with the base model's tensors.
    """

    def __init__(self, base: ModelSource, adapter: Adapter, cast: str | None = None) -> None:
        require_untied(adapter, "merging")
        self.base, self.adapter, self._cast = base, adapter, cast
        self.path: Path = base.path
        self.config: McaModelConfig = base.config
        self.params: Sequence[Param] = base.params
        if adapter.model.head.num_labels is not None and base.config.head.num_labels is None:
            self.config = with_head(base.config, _head(adapter.model))
            self.params = stored_params(get_family(self.config.model_type).params(self.config))
        new = (param for param in self.params if param.hf[0].startswith(f"{SCORE}."))
        self._new = {} if self.config is base.config else {param.mca_name(): param for param in new}
        for name, param in self._new.items():
            if name not in adapter.saved_by_name:
                raise McaError(
                    f"the adapter was trained on a model with {param.hf[0]}, which neither it nor {base.path} has; "
                    "name the model that it was trained on"
                )
        known = {param.mca_name() for param in self.params}
        lost = sorted({*adapter.factors_by_name, *adapter.saved_by_name} - known)
        if lost:
            raise McaError(
                f"the adapter changes {lost[0]}, which the base model does not have"
                "; name the base model that it was trained on"
            )
        self._parts: dict[str, tuple[Part, ...]] = {}

    def touches(self, param: Param) -> bool:
        """Return whether the HF tensors of ``param`` change."""
        name = param.mca_name()
        return name in self.adapter.factors_by_name or name in self.adapter.saved_by_name

    def side(self, param: Param) -> Side:
        """Return the side of ``param``'s rule that its parts are on."""
        return HF if self.touches(param) else self.base.side(param)

    def parts(self, param: Param) -> tuple[Part, ...]:
        """Return the parts that hold ``param``, in the side's order."""
        if not self.touches(param):
            return self.base.parts(param)
        name = param.mca_name()
        if name not in self._parts:
            shapes = part_shapes(Rule.from_param(param), self.full_shape(param), HF)
            self._parts[name] = tuple(self._part(param, number, shape) for number, shape in enumerate(shapes))
        return self._parts[name]

    def _part(self, param: Param, number: int, shape: Shape) -> Part:
        dtype = self._dtype(param, number)
        if not self._changes(param, number) and self.base.side(param) is HF:
            stored = self.base.parts(param)[number]
            if stored.info.dtype == dtype:
                return stored
        return Part(MergedTensor(self, param, number, shape, dtype), shape)

    def _changes(self, param: Param, number: int) -> bool:
        """Return whether the adapter may change HF tensor ``param.hf[number]``."""
        name = param.mca_name()
        return name in self.adapter.saved_by_name or any(
            len(pair.target.base.hf) != len(param.hf) or pair.target.part == number
            for pair in self.adapter.factors_by_name[name]
        )

    def _dtype(self, param: Param, number: int) -> str:
        own, cast = self.stored(param, number).dtype, self._cast
        return cast if cast and own in DTYPE_NAMES and (cast == "F32" or not param.keep_fp32) else own

    def stored(self, param: Param, number: int) -> TensorInfo | ComputedTensor:
        """Return the base model's HF tensor ``param.hf[number]``; its embedding in place of a head."""
        if param.mca_name() in self._new:
            param, number = self.base.params[0], 0
        parts = self.base.parts(param)
        return parts[number if self.base.side(param) is HF else 0].info

    def full_shape(self, param: Param) -> Shape:
        """Return the full shape of ``param``, without vocabulary padding."""
        new = param.mca_name() in self._new
        return full_shape(param, self.config) if new else self.base.full_shape(param)

    def gathers(self, param: Param, side: Side) -> tuple[Gather, ...]:
        """Plan how to fill the tensors of ``side`` that hold ``param``."""
        if self.touches(param):
            return plan_gathers(param, self.full_shape(param), HF, side)
        return self.base.gathers(param, side)

    def check_duplicates(self) -> None:
        """Check that tensors stored several times are equal."""
        self.base.check_duplicates()

    def checksums(self) -> Mapping[Path, int]:
        """Return the CRC-32 of each file, where known."""
        return self.base.checksums()

    def tensors(self) -> "Iterable[TensorInfo | ComputedTensor]":
        """Return the stored tensors of the base model."""
        return self.base.tensors()

    def factors_on(self, param: Param, number: int) -> "Iterator[tuple[LoraFactors, NumpyArray, slice]]":
        """The factors on one HF tensor, the rows of lora_B that matter, and the rows that they change.

        Adapter and base may see a linear otherwise: each module its own tensor, or q, k and v, or gate and up, in one.
        """
        for pair in self.adapter.factors_by_name.get(param.mca_name(), ()):
            b = pair.b.from_full(self.adapter.read(pair.b))[0]
            mine, its = len(param.hf), len(pair.target.base.hf)
            if mine == its:
                if pair.target.part == number:
                    yield pair, b, slice(0, len(b))
            elif mine == 1:  # the adapter's parts are rows of this one tensor
                yield pair, b, self._row_range(pair.target.base, pair.target.part)
            else:  # this tensor is some rows of the adapter's one
                rows = self._row_range(param, number)
                yield pair, b[rows], slice(0, rows.stop - rows.start)

    def _row_range(self, param: Param, number: int) -> slice:
        """Return the rows of HF tensor ``param.hf[number]`` in all of them one after the other."""
        shapes = param_part_shapes(param, full_shape(param, self.adapter.model), HF)
        ends = [0, *accumulate(shape[0] for shape in shapes)]
        return slice(ends[number], ends[number + 1])


def _head(model: McaModelConfig) -> Head:
    hf = model.hf_config
    return Head(
        kind=model.head.head_kind,
        labels=label_names(model),
        problem_type=hf.get("problem_type"),
        pad_token_id=hf.get("pad_token_id"),
    )


@dataclass(frozen=True, slots=True)
class MergedTensor(LazyTensorBase):
    """HF tensor ``param.hf[number]`` (an expert's own entry of a stacked one) after merging.

    Args:
        source: Which models are merged.
        param: The base parameter's rule.
        number: Which of its HF tensors.
        shape: Of that tensor.
        dtype: Safetensors code of what is read.
    """

    source: MergedSource
    param: Param
    number: int
    shape: Shape
    dtype: str

    @property
    def name(self) -> str:
        """Name of the HF tensor."""
        return self.param.hf_names()[self.number]

    @property
    def file(self) -> Path:
        """File of the base model's weight."""
        return self.source.stored(self.param, self.number).file

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Rows ``start:stop``: those of all blocks that they touch are computed."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        out = np.empty((max(stop - start, 0), *self.shape[1:]), numpy_dtype(self.dtype))
        for first, last in self._blocks(start, stop):
            low, high = max(first, start), min(last, stop)
            rows = self._block(first, last)[low - first : high - first]
            cast_into(rows, out[low - start : high - start], self.name)
        return out

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield first row and end of each block that has some of rows ``start:stop``."""
        step = max(1, _BLOCK // max(1, prod(self.shape[1:])))
        for first in range(start // step * step, stop, step):
            yield first, min(first + step, self.shape[0])

    def _block(self, start: int, stop: int) -> NumpyArray:
        """Rows ``start:stop`` in their stored dtype, or wide where they are to be cast or the adapter saved them."""
        own = numpy_dtype(self.source.stored(self.param, self.number).dtype)
        weight = self._stored(start, stop, own)
        if numpy_dtype(self.dtype) != own:
            weight = weight.astype(_work(own))
        for pair, b, rows in self.source.factors_on(self.param, self.number):
            a = self.source.adapter.read(pair.a)
            if pair.target.transposed:
                changed, a = weight.T[rows], a[:, start:stop]
            else:
                first, last = max(rows.start, start), min(rows.stop, stop)
                if first >= last:
                    continue  # the block has none of them
                changed, b = weight[first - start : last - start], b[first - rows.start : last - rows.start]
            if not add_product(changed, a, b, pair.scale):
                raise self._fault(own)
        return weight

    def _fault(self, dtype: NumpyDtype) -> McaError:
        """Return the error about a result that is not finite, which names the operand that is not, if one is not."""
        blocks = self._blocks(0, self.shape[0])
        stored = sum(int(non_finite(self._stored(*block, dtype)).sum()) for block in blocks)
        counts = {f"{self.file}: {self.name}": stored} if stored else {}
        if not counts:
            factors = self.source.adapter.factors_by_name.get(self.param.mca_name(), ())
            params = (param for pair in factors for param in (pair.a, pair.b))
            counts = counts_in((param.hf_names()[0], self.source.adapter.read(param)) for param in params)
        if not counts:
            return McaError(
                f"{self.name}: merging gives values that are not finite in {dtype}; the adapter's scale is too large"
            )
        where, what = ("", "checkpoint") if stored else ("the adapter's ", "adapter")
        return McaError(
            f"{self.name}: merging gives values that are not finite in {dtype}: {where}{named_counts(counts)}; repair "
            f"the {what}"
        )

    def _stored(self, start: int, stop: int, dtype: NumpyDtype) -> NumpyArray:
        """Rows ``start:stop`` before merging, or as the adapter saved them, wide; a fresh array."""
        adapter = self.source.adapter
        saved = adapter.saved_by_name.get(self.param.mca_name())
        if saved is not None:
            return self._saved(saved, start, stop).astype(_work(dtype))
        base = self.source.base
        return self._rows(
            base.gathers(self.param, HF)[self.number], base.parts(self.param), start, stop, dtype
        )

    def _saved(self, saved: Param, start: int, stop: int) -> NumpyArray:
        """Rows ``start:stop`` as the adapter saved them; only these are read where its files have them."""
        adapter = self.source.adapter
        full = full_shape(saved, adapter.model)
        shape = param_part_shapes(saved, full, HF)[self.number]
        if shape != self.shape:
            raise McaError(
                f"{self.name}: the adapter saved shape {list(shape)}, the base model's is "
                f"{list(self.shape)}; merge into the model that it was trained on"
            )
        if adapter.saved_parts is None:
            return np.asarray(saved.from_full(adapter.read(saved))[self.number][start:stop])
        side, parts = adapter.saved_parts(saved)
        gather = plan_gathers(saved, full, side, HF)[self.number]
        stored = parts[gather.moves[0].part if gather.moves else 0].info
        return self._rows(gather, parts, start, stop, numpy_dtype(stored.dtype))

    def _rows(
        self, gather: Gather, parts: Sequence[Part], start: int, stop: int, dtype: NumpyDtype
    ) -> NumpyArray:
        out = np.empty((stop - start, *self.shape[1:]), dtype)
        fill(out.reshape(-1), gather, parts, start * prod(self.shape[1:]))
        return out


def fill(out: NumpyArray, gather: Gather, parts: Sequence[Part], start: int = 0) -> None:
    """Fill flat ``out`` with the elements from ``start`` on of what ``gather`` takes from ``parts``."""
    for zero in gather.zeros:
        out[max(zero[0] - start, 0) : max(zero[1] - start, 0)] = 0
    for whole in gather.moves:
        for move in clip(whole, start, start + out.size):
            part = parts[move.part]
            first = part.start + move.source
            copy_move(part.elements()[first : first + move.source_span], out, move._replace(source=0))


def add_product(weight: NumpyArray, a: NumpyArray, b: NumpyArray, scale: float) -> bool:
    """``weight += scale * b @ a`` in place, each element rounded once; whether all results are finite."""
    work = _work(weight.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # the result shows it
        delta = b.astype(work) @ a.astype(work)
        delta *= work.type(scale)
        delta += weight.astype(work)
        weight[...] = delta.astype(weight.dtype)
    # NumPy knows float16; bfloat16 has float32's range
    return bool(np.isfinite(weight if weight.dtype == np.float16 else delta).all())


def _work(dtype: NumpyDtype) -> NumpyDtype:
    """The type in which weights of ``dtype`` are computed with."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
