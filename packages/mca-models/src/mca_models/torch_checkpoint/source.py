"""Megatron checkpoint of any format as a ``ModelSource`` of the converter.

`roll` and `torch_dist` find the tensors of their formats.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.storage.byte_ranges import Gather, Shape
from mca_models.storage.copy_plan import Rule, Side, part_shapes
from mca_models.storage.dtypes import DTYPE_NAMES
from mca_models.storage.lazy_tensor import Block, GridTensor, StridedTensor
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ComputedTensor, Part, apply_gather, plan_gathers
from mca_models.templates.shapes import full_shape
from mca_models.torch_checkpoint.storages import StoredTensor, storages, to_storage
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray

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
class ForeignSource:
    """An opened checkpoint: every parameter of the model is there, once or in equal copies.

    A ``ModelSource``. The parts are runs of bytes in which the elements need not lie in order.

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
        place = self.places[param.mca_name()]
        planned = plan_gathers(param, place.whole, place.side, side)
        return tuple(to_storage(gather, place.tensors) for gather in planned)

    def tensors(self) -> Iterable[TensorInfo | ComputedTensor]:
        """All runs of bytes that hold parameters."""
        for param in self.params:
            for part in self.parts(param):
                yield part.info

    def checksums(self) -> Mapping[Path, int]:
        """Return nothing: these formats have no checksums."""
        return {}

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
