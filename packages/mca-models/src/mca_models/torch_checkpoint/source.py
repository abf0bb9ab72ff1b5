"""Megatron checkpoint of any format as a ``ModelSource`` of the converter.

`roll` and `torch_dist` find the tensors of their formats. A ``Gather`` counts a source part's elements in the order of
its axes, but these tensors need not lie so: one may be a few columns of a wider one, or stand in several chunks.
``to_storage`` rewrites a gather so that it reads from plain runs of bytes, which the converter copies file to file.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.storage.byte_ranges import Gather, Move, Shape, in_unit_steps, strided_runs
from mca_models.storage.copy_plan import Rule, Side, part_shapes
from mca_models.storage.dtypes import DTYPE_NAMES
from mca_models.storage.lazy_tensor import Block, GridTensor, StridedTensor
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ComputedTensor, ModelSource, Part, apply_gather
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
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
    return tuple(_span(block.tensor) for block in _blocks(tensor))


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


def _blocks(tensor: StoredTensor) -> tuple[Block, ...]:
    if isinstance(tensor, GridTensor):
        return tensor.chunks
    return (Block((0,) * len(tensor.shape), tensor),)


def _geometry(tensor: StoredTensor) -> _Geometry:
    blocks = [(block.offsets, block.tensor) for block in _blocks(tensor)]
    return tensor.shape, tuple(_Block(offsets, inner.shape, inner.strides) for offsets, inner in blocks)


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


_OUTPUT = "output_layer.weight"
_COMPARED = 1 << 22  # elements at a time


@dataclass(frozen=True)
class StoredParam:
    """Stored tensors of one parameter.

    Args:
        whole: Its shape, without vocabulary padding.
        side: What ``tensors`` are: the pieces of so many ranks.
        tensors: In rank order.
        copies: Pairs of tensors that must be equal: one that is read, one that is not.
    """

    whole: Shape
    side: int
    tensors: tuple[StoredTensor, ...]
    copies: tuple[tuple[StoredTensor, StoredTensor], ...] = ()


@dataclass
class ForeignSource(ModelSource):
    """An opened checkpoint: every parameter of the model is there, once or in equal copies.

    The parts are runs of bytes in which the elements need not lie in order.

    Args:
        path: Of the checkpoint.
        config: Of the model.
        params: Those that are stored: all but second copies.
        places: By canonical name.
    """

    path: Path
    config: McaModelConfig
    params: Sequence[Param]
    places: Mapping[str, StoredParam]
    _parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)

    def side(self, param: Param) -> Side:
        """Return the side of ``param``'s rule that its parts are on."""
        return self.places[param.mca_name()].side

    def full_shape(self, param: Param) -> Shape:
        """Return the full shape of ``param``, without vocabulary padding."""
        return self.places[param.mca_name()].whole

    def parts(self, param: Param) -> tuple[Part, ...]:
        """Return the runs of bytes of the parameter, as ``gathers`` counts them."""
        name = param.mca_name()
        if name not in self._parts:
            self._parts[name] = tuple(
                part for tensor in self.places[name].tensors for part in storages(tensor)
            )
        return self._parts[name]

    def gathers(self, param: Param, side: Side) -> tuple[Gather, ...]:
        """Plan how to fill the tensors of ``side`` that hold ``param`` from its ``parts``."""
        tensors = self.places[param.mca_name()].tensors
        return tuple(to_storage(gather, tensors) for gather in super().gathers(param, side))

    def tensors(self) -> Iterable[TensorInfo | ComputedTensor]:
        """All runs of bytes that hold parameters."""
        for param in self.params:
            for part in self.parts(param):
                yield part.info

    def read(self, param: Param, side: Side) -> "tuple[NumpyArray, ...]":
        """The tensors of ``side`` that hold ``param``, as fresh arrays."""
        flats = [part.flat() for part in self.parts(param)]
        return tuple(apply_gather(gather, flats) for gather in self.gathers(param, side))

    def check_duplicates(self) -> None:
        """Raise if a tensor that the files hold several times differs. Reads all of these."""
        for name, place in self.places.items():
            for first, second in place.copies:
                _require_equal(name, first, second)


def _require_equal(name: str, first: StoredTensor, second: StoredTensor) -> None:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        fault = f"{first.dtype} {list(first.shape)} there, {second.dtype} {list(second.shape)} here"
        raise McaError(f"{second.file}: {name} is not as in {first.file}: {fault}")
    a, b = first.flat(), second.flat()
    for start in range(0, len(a), _COMPARED):
        left, right = a[start : start + _COMPARED], b[start : start + _COMPARED]
        if not np.array_equal(left.view(np.uint8), right.view(np.uint8)):
            if second.name == _OUTPUT:
                raise McaError(
                    f"{second.file}: {_OUTPUT} must repeat {name} in this model (tied), but differs from it; if the "
                    "two are meant to differ, set tie_word_embeddings to false in its configuration"
                )
            raise McaError(
                f"{second.file}: {name} differs from the copy in {first.file}; the ranks did not hold the same "
                "model, so the checkpoint cannot be trusted"
            )


def locate_param(param: Param, config: McaModelConfig, pieces: Sequence[StridedTensor]) -> StoredParam:
    """Return the stored tensors of ``param``, from the ``pieces`` of its ranks in their order.

    Raises:
        McaError: They do not make up the shape that the configuration demands.
    """
    whole = full_shape(param, config)
    if param.vocab:
        return StoredParam(whole, 1, (_stack_rows(param, pieces, whole),))
    size = 1 if param.shard.axis is None else len(pieces)
    try:
        shapes = part_shapes(Rule.from_param(param), whole, size)
    except ValueError as error:
        raise McaError(f"{param.mca_name()} of shape {list(whole)}: {error}") from None
    if all(piece.shape == shapes[min(rank, size - 1)] for rank, piece in enumerate(pieces)):
        copies = tuple((pieces[0], piece) for piece in pieces[1:]) if size == 1 else ()
        return StoredParam(whole, size, tuple(pieces[:size]), copies)
    if size == 1 and len(pieces) > 1:  # one Megatron cuts what another replicates (latent down projections)
        return StoredParam(whole, 1, (_stack_rows(param, pieces, whole),))
    found = " and ".join(str(list(shape)) for shape in dict.fromkeys(piece.shape for piece in pieces))
    raise McaError(
        f"{pieces[0].file}: {pieces[0].name} has shape {found} on {len(pieces)} ranks; "
        f"{param.mca_name()} should be {list(whole)}, cut into {list(shapes[0])}"
    )


def with_stored_dtype(config: McaModelConfig, places: Mapping[str, StoredParam]) -> McaModelConfig:
    """Return ``config`` with the dtype that most weights are stored in."""
    counts = Counter(tensor.dtype for place in places.values() for tensor in place.tensors)
    code = counts.most_common(1)[0][0]
    dtype: Typed = DTYPE_NAMES.get(code, config.dtype)
    return config if dtype == config.dtype else replace(config, dtype=dtype)


def _stack_rows(param: Param, pieces: Sequence[StridedTensor], whole: Shape) -> StoredTensor:
    """The pieces one below the other; rows beyond those of ``whole`` are padding of the vocabulary."""
    rows = sum(piece.shape[0] for piece in pieces)
    enough = rows >= whole[0] if param.vocab else rows == whole[0]
    if not enough or any(piece.shape[1:] != whole[1:] for piece in pieces):
        shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
        raise McaError(
            f"{pieces[0].file}: {pieces[0].name} is {shapes} on {len(pieces)} ranks, which does not make up "
            f"{param.mca_name()} of {list(whole)}"
        )
    if len(pieces) == 1:
        return pieces[0]
    chunks, start = [], 0
    for piece in pieces:
        chunks.append(Block((start, *(0 for _ in whole[1:])), piece))
        start += piece.shape[0]
    return GridTensor(pieces[0].name, pieces[0].dtype, (rows, *whole[1:]), tuple(chunks))


def grouped_expert(tensor: StridedTensor, number: int, count: int, *, first: bool) -> StridedTensor:
    """Expert ``number`` of ``count`` in a tensor that holds all of them, transposed.

    Megatron's old grouped module keeps ``weight1`` [hidden, count x 2 ffn] and ``weight2``
    [count x ffn, hidden]. Despite these shapes, the bytes of both are those of
    [count, in, out]: one expert after the other, each [in, out].

    Args:
        tensor: ``weight1`` or ``weight2``.
        number: Which expert.
        count: Experts on the rank.
        first: Whether it is ``weight1``.
    """
    rows, columns = tensor.shape
    cut, rest = divmod(columns if first else rows, count)
    if rest or not tensor.is_contiguous:
        raise McaError(f"{tensor.file}: {tensor.name} of {list(tensor.shape)} does not hold {count} experts")
    inner, outer = (rows, cut) if first else (cut, columns)
    offset = tensor.offset + number * prod((inner, outer)) * tensor.itemsize
    return StridedTensor(tensor.name, tensor.dtype, (outer, inner), (1, outer), offset, tensor.file)
