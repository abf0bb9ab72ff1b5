"""From moves between tensors to moves from the bytes that hold them.

A ``Gather`` counts a source part's elements in the order of its axes. The tensors of foreign checkpoints
need not lie so: one may be a few columns of a wider one, or stand in several chunks. ``to_storage``
rewrites a gather so that it reads from plain runs of bytes, which the converter copies file to file.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from mca_models.storage.byte_ranges import Gather, Move, in_unit_steps, strided_runs
from mca_models.storage.lazy_tensor import GridTensor, Shape, StridedTensor
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part
from mca_models.weights.arrays import NumpyArray

StoredTensor = StridedTensor | GridTensor


class _Block(NamedTuple):
    """Block of a tensor, in its own storage."""

    offsets: Shape
    shape: Shape
    strides: Shape


_Geometry = tuple[Shape, tuple[_Block, ...]]  # of one tensor: its shape and blocks


def storages(tensor: StoredTensor) -> tuple[Part, ...]:
    """Return the runs of bytes of ``tensor``, one for each of its blocks."""
    return tuple(_span(block) for block in _blocks(tensor))


def to_storage(gather: Gather, tensors: Sequence[StoredTensor]) -> Gather:
    """``gather``, which reads from ``tensors``, reading from their ``storages`` (of all, in order)."""
    if all(isinstance(tensor, StridedTensor) and tensor.is_contiguous for tensor in tensors):
        return gather
    return _compose(_Same(gather), tuple(_geometry(tensor) for tensor in tensors))


class _Same:
    """A gather as a cache key: by identity, since its moves are many."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    def __hash__(self) -> int:
        return id(self.gather)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.gather is self.gather


def _blocks(tensor: StoredTensor) -> tuple[StridedTensor, ...]:
    if isinstance(tensor, StridedTensor):
        return (tensor,)
    return tuple(chunk.tensor for chunk in tensor.chunks)


def _geometry(tensor: StoredTensor) -> _Geometry:
    if isinstance(tensor, StridedTensor):
        return tensor.shape, (_Block((0,) * len(tensor.shape), tensor.shape, tensor.strides),)
    blocks = tuple(_Block(chunk.offsets, chunk.tensor.shape, chunk.tensor.strides) for chunk in tensor.chunks)
    return tensor.shape, blocks


def _span(block: StridedTensor) -> Part:
    size = 0
    if prod(block.shape):
        size = 1 + sum((n - 1) * step for n, step in zip(block.shape, block.strides, strict=True))
    info = TensorInfo(block.name, block.dtype, (size,), block.offset, size * block.itemsize, block.file)
    return Part(info, (size,))


@lru_cache(maxsize=256)
def _compose(key: _Same, geometries: tuple[_Geometry, ...]) -> Gather:
    gather = key.gather
    moves = [part for move in gather.moves for part in in_unit_steps(move)]
    places, first = [], 0
    for geometry in geometries:
        places.append(_tensor_runs(geometry, first))
        first += len(geometry[1])
    pieces = [
        _split(_move_runs([move for move in moves if move.part == part]), runs)
        for part, runs in enumerate(places)
    ]
    return Gather(gather.shape, tuple(_moves(np.concatenate(pieces, axis=1))), gather.zeros)


def _tensor_runs(geometry: _Geometry, first: int) -> NumpyArray:
    """Return the runs of a tensor's elements; rows: position in the tensor, storage, position in it, length."""
    shape, blocks = geometry
    columns = [_block_runs(shape, block, first + number) for number, block in enumerate(blocks)]
    runs = np.concatenate(columns, axis=1)
    runs = runs[:, np.argsort(runs[0], kind="stable")]
    return _merged(runs)


def _block_runs(shape: Shape, block: _Block, storage: int) -> NumpyArray:
    in_runs = bool(block.shape) and (block.strides[-1] == 1 or block.shape[-1] == 1)
    length = block.shape[-1] if in_runs else 1
    axes = block.shape[:-1] if in_runs else block.shape
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = np.full((1,) * len(axes), sum(a * b for a, b in zip(block.offsets, steps, strict=True)))
    stored = np.zeros_like(at)
    for axis, size in enumerate(axes):
        numbers = np.arange(size).reshape([-1 if k == axis else 1 for k in range(len(axes))])
        at, stored = at + numbers * steps[axis], stored + numbers * block.strides[axis]
    at = at.reshape(-1)
    return np.stack([at, np.full_like(at, storage), stored.reshape(-1), np.full_like(at, length)])


def _merged(runs: NumpyArray) -> NumpyArray:
    """``runs`` with those joined that go on in both the tensor and the storage."""
    at, storage, stored, length = runs
    goes_on = (at[1:] == at[:-1] + length[:-1]) & (stored[1:] == stored[:-1] + length[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~(goes_on & (storage[1:] == storage[:-1]))]))
    return np.stack([at[starts], storage[starts], stored[starts], np.add.reduceat(length, starts)])


def _move_runs(moves: Sequence[Move]) -> NumpyArray:
    """All runs of ``moves``; rows: source, target, length."""
    if not moves:
        return np.zeros((3, 0), np.int64)
    repeats = np.array([move.repeat for move in moves])
    owner = np.repeat(np.arange(len(moves)), repeats)
    number = np.arange(owner.size) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    table = np.array([move[1:7] for move in moves], np.int64)[owner].T
    source, target, run, _, source_stride, target_stride = table
    return np.stack([source + number * source_stride, target + number * target_stride, run])


def _split(wanted: NumpyArray, runs: NumpyArray) -> NumpyArray:
    """``wanted`` cut where ``runs`` end; rows: storage, position in it, target, length."""
    source, target, length = wanted
    at, storage, stored, size = runs
    first = np.searchsorted(at, source, "right") - 1
    count = np.searchsorted(at, source + length, "left") - first
    owner = np.repeat(np.arange(source.size), count)
    run = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(owner.size)
    start = np.maximum(source[owner], at[run])
    stop = np.minimum((source + length)[owner], (at + size)[run])
    return np.stack(
        [storage[run], stored[run] + start - at[run], target[owner] + start - source[owner], stop - start]
    )


def _moves(pieces: NumpyArray) -> list[Move]:
    """``pieces`` as strided moves, in the order of their targets."""
    moves: list[Move] = []
    for storage in sorted(set(pieces[0].tolist())):
        mine = pieces[1:, pieces[0] == storage]
        ordered = mine[:, np.argsort(mine[1], kind="stable")]
        moves += (Move(storage, *run) for run in strided_runs(ordered))
    return sorted(moves, key=lambda move: (move.target, move.part))
