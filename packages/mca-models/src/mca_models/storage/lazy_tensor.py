"""Tensors of checkpoints in other formats, read slice by slice.

All kinds have ``name``, ``dtype``, ``shape``, ``file``, ``nbytes`` and ``itemsize`` as a safetensors
``TensorInfo`` has, and

    read(start, stop)   rows start to stop, as a fresh array
    flat()              all elements in one axis; slicing it reads what the slice touches

``StridedTensor.info()`` gives the ``TensorInfo`` itself where the elements lie in one run of bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from mca_config.errors import McaError
from mca_models.storage.dtypes import ITEM_SIZES, numpy_dtype
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import TensorMeta
from mca_models.weights.arrays import NumpyArray

Shape = tuple[int, ...]
MAX_GRID_CELLS = 1 << 20


class LazyTensor(TensorMeta, Protocol):
    """Anything that rows can be read from."""

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """A fresh array of rows ``start:stop`` (of everything, for a scalar)."""


class LazyTensorBase:
    """Base of lazy tensors with ``name``, ``dtype``, ``shape`` and ``read``."""

    __slots__ = ()

    @property
    def itemsize(self: LazyTensor) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self: LazyTensor) -> int:
        """Bytes of all elements, as they are read."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]

    def array(self: LazyTensor) -> NumpyArray:
        """All elements, as a fresh array where no file holds them as they are."""
        return self.read()

    def flat(self: LazyTensor) -> "FlatRows | NumpyArray":
        """The elements in one axis, to be sliced."""
        return FlatRows(self)


class FlatRows:
    """A tensor's elements in one axis; a slice reads the rows that it touches, no others.

    Args:
        tensor: Whose elements.
        read: Reads rows from one number to another; None: ``tensor.read``.
        row: Elements of a row of ``read``; None: of ``tensor``.
    """

    def __init__(
        self, tensor: LazyTensor, read: Callable[[int, int], NumpyArray] | None = None, row: int | None = None
    ) -> None:
        self._read = read or tensor.read
        self._row = (prod(tensor.shape[1:]) if tensor.shape else 1) if row is None else row
        self.dtype = numpy_dtype(tensor.dtype)
        self.itemsize = self.dtype.itemsize
        self.size = prod(tensor.shape)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: slice) -> NumpyArray:
        start, stop, step = index.indices(self.size)
        if step != 1:
            raise IndexError("only runs of elements can be read")
        if stop <= start:
            return np.empty(0, self.dtype)
        first, last = start // self._row, -(-stop // self._row)
        rows = self._read(first, last).reshape(-1)
        return rows[start - first * self._row : stop - first * self._row]


@dataclass(frozen=True, slots=True)
class StridedTensor(LazyTensorBase):
    """A view of a run of bytes in a file, as ``torch.save`` stores tensors that share a storage."""

    name: str
    dtype: str
    shape: Shape
    strides: Shape
    """In elements."""
    offset: int
    """First byte, counted from the start of the file."""
    file: Path

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie in order, in one run."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return prod(self.shape) == 0
            step *= size
        return True

    def info(self) -> TensorInfo | None:
        """The same as a plain tensor; None if the elements do not lie in one run."""
        if not self.is_contiguous:
            return None
        return TensorInfo(self.name, self.dtype, self.shape, self.offset, self.nbytes, self.file)

    def array(self) -> NumpyArray:
        """A read-only view, mapped from the file: pages are read when touched."""
        dtype = numpy_dtype(self.dtype)
        if prod(self.shape) == 0:
            return np.empty(self.shape, dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, (span * dtype.itemsize,))
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        # not as_strided, which has no name for some of the 8-bit floats
        return np.ndarray(self.shape, dtype, mapped, 0, strides)

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Read rows ``start:stop`` as a fresh array."""
        whole = self.array()
        return np.array(whole[start:stop] if self.shape else whole, order="C")

    def flat(self) -> FlatRows | NumpyArray:
        """Return all elements in one axis; mapped from the file where they are contiguous."""
        return self.array().reshape(-1) if self.is_contiguous else FlatRows(self)

    def entry(self, index: int) -> "StridedTensor":
        """Entry ``index`` of axis 0."""
        offset = self.offset + index * self.strides[0] * self.itemsize
        return StridedTensor(self.name, self.dtype, self.shape[1:], self.strides[1:], offset, self.file)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor."""

    offsets: Shape
    """Offset of its first element."""
    tensor: StridedTensor


@dataclass(frozen=True, slots=True)
class GridTensor(LazyTensorBase):
    """A tensor in several blocks that fill it exactly."""

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Block, ...]

    @property
    def file(self) -> Path:
        """The file of the first block."""
        return self.chunks[0].tensor.file

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Read rows ``start:stop`` as a fresh array."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        out = np.empty((max(stop - start, 0), *self.shape[1:]), numpy_dtype(self.dtype))
        for chunk in self.chunks:
            top, size = chunk.offsets[0], chunk.tensor.shape[0]
            first, last = max(start, top), min(stop, top + size)
            if first >= last:
                continue
            inner = zip(chunk.offsets[1:], chunk.tensor.shape[1:], strict=True)
            place = (slice(first - start, last - start), *(slice(at, at + size) for at, size in inner))
            out[place] = chunk.tensor.array()[first - top : last - top]
        return out


def assemble(
    name: str, dtype: str, shape: Shape, chunks: Sequence[Block], where: str
) -> "StridedTensor | GridTensor":
    """The tensor that ``chunks`` make up: the only one itself, or their grid.

    Raises:
        McaError: They leave a hole, overlap, or reach outside of ``shape``.
    """
    if fault := _tiling_fault(shape, chunks):
        raise McaError(f"{where}: the chunks of {name} {fault}; the checkpoint is damaged")
    if len(chunks) == 1:
        only = chunks[0].tensor
        return StridedTensor(name, dtype, shape, only.strides, only.offset, only.file)
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets)
    return GridTensor(name, dtype, shape, tuple(ordered))


def _tiling_fault(shape: Shape, chunks: Sequence[Block]) -> str | None:
    """Return why ``chunks`` do not fill ``shape`` exactly; None if they do."""
    if _is_stack(shape, chunks):
        return None
    ends = [tuple(map(sum, zip(chunk.offsets, chunk.tensor.shape, strict=True))) for chunk in chunks]
    outside = any(end > size for stops in ends for end, size in zip(stops, shape, strict=True))
    if outside:
        return f"reach outside of its shape {list(shape)}"
    cuts = [sorted({0, size}) for size in shape]
    for axis in range(len(shape)):
        at = {chunk.offsets[axis] for chunk in chunks} | {stops[axis] for stops in ends}
        cuts[axis] = sorted({*cuts[axis], *at})
    if prod(len(axis) for axis in cuts) > MAX_GRID_CELLS:
        return "are cut in too many ways"
    numbers = [{cut: number for number, cut in enumerate(axis)} for axis in cuts]
    times = np.zeros([len(list(pairwise(axis))) for axis in cuts], np.int32)
    for chunk, stops in zip(chunks, ends, strict=True):
        bounds = zip(numbers, chunk.offsets, stops, strict=True)
        times[tuple(slice(number[low], number[high]) for number, low, high in bounds)] += 1
    if (times > 1).any():
        return "overlap"
    return "leave a hole" if (times == 0).any() else None


def _is_stack(shape: Shape, chunks: Sequence[Block]) -> bool:
    """Return whether ``chunks`` follow one another along one axis: the common case, checked without an array."""
    first = chunks[0].tensor.shape if chunks else ()
    cut = [axis for axis, (size, part) in enumerate(zip(shape, first, strict=False)) if part != size]
    if len(first) != len(shape) or len(cut) > 1 or not chunks:
        return False
    axis, start = (cut or [0])[0], 0
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets) if len(chunks) > 1 else chunks
    for chunk in ordered:
        size = chunk.tensor.shape
        if not shape:
            return len(chunks) == 1
        if chunk.offsets != (*(0,) * axis, start, *(0,) * (len(shape) - axis - 1)):
            return False
        if (*size[:axis], *size[axis + 1 :]) != (*shape[:axis], *shape[axis + 1 :]):
            return False
        start += size[axis]
    return start == shape[axis]
