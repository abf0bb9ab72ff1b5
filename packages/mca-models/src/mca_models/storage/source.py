"""Checkpoint of any format as a source of parameters.

A source knows its model (``config``, ``params``) and where the parts of each parameter are. Reading a
piece for one rank touches only the bytes of that piece.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_models.storage.byte_ranges import Gather, Move, Shape
from mca_models.storage.copy_plan import Rule, Side, part_shapes, plan_moves
from mca_models.storage.safetensors import TensorInfo
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray


class TensorMeta(Protocol):
    """A tensor of a checkpoint, as it is read."""

    @property
    def name(self) -> str:
        """Name in the file, or of the tensor that it is dequantised or merged to."""

    @property
    def dtype(self) -> str:
        """Safetensors code of the elements as they are read."""

    @property
    def shape(self) -> Shape:
        """Sizes of all axes."""

    @property
    def file(self) -> Path:
        """File with most of it, for errors."""


class FlatElements(Protocol):
    """The elements of a tensor in one axis, a slice of which is an array: a NumPy array, or `FlatRows`."""

    def __getitem__(self, index: slice, /) -> NumpyArray:
        """Return a run of elements."""

    def __len__(self) -> int:
        """Return the number of elements."""


class ComputedTensor(TensorMeta, Protocol):
    """Tensor whose elements are computed as they are read (dequantised, merged)."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element as it is read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements as they are read."""

    def array(self) -> NumpyArray:
        """All elements, as a fresh array."""

    def flat(self) -> FlatElements:
        """The elements in one axis; a slice of it is a fresh array."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor, or one expert's entry of a stacked one."""

    info: TensorInfo | ComputedTensor
    shape: Shape
    start: int = 0
    """First element, counted from the tensor's own first."""

    def flat(self) -> NumpyArray:
        """The elements in one axis: mapped from the file, or computed."""
        elements: NumpyArray = self.elements()[self.start : self.start + prod(self.shape)]
        return elements

    def elements(self) -> FlatElements:
        """Return the elements of the full tensor in one axis, to be sliced."""
        return self.info.array().reshape(-1) if isinstance(self.info, TensorInfo) else self.info.flat()


class ModelSource(Protocol):
    """A checkpoint that has been opened and found complete; base of the classes for all formats.

    ``params`` are those that the checkpoint stores: all of the model's but second copies (``alias_of``).
    """

    path: Path
    config: McaModelConfig
    params: Sequence[Param]

    def side(self, param: Param) -> Side:
        """On which side of ``param``'s rule the parts lie."""

    def parts(self, param: Param) -> tuple[Part, ...]:
        """The parts that hold ``param``, in the side's order."""

    def full_shape(self, param: Param) -> Shape:
        """Shape of the whole parameter, without vocabulary padding."""

    def gathers(self, param: Param, side: Side) -> tuple[Gather, ...]:
        """Plan how to fill the tensors of ``side`` that hold ``param`` from its ``parts``."""
        return plan_gathers(param, self.full_shape(param), self.side(param), side)

    def check_duplicates(self) -> None:
        """Raise if what is stored several times differs, after reading all of it; here nothing is."""
        return

    def tensors(self) -> Iterable[TensorInfo | ComputedTensor]:
        """All that is stored."""

    def checksums(self) -> Mapping[Path, int]:
        """Return the CRC-32 that each file must have; empty if unknown."""
        return {}


def plan_gathers(param: Param, whole: Shape, source: Side, target: Side) -> tuple[Gather, ...]:
    """``plan_moves`` with an error that names the parameter."""
    try:
        return plan_moves(Rule.from_param(param), whole, source, target)
    except ValueError as error:
        raise McaError(f"{param.mca_name()} of shape {list(whole)}: {error}") from None


def plan_shard(source: ModelSource, param: Param, rank: int, size: int) -> tuple[Gather, tuple[Part, ...]]:
    """Plan the copy of the shard of ``rank`` of ``size`` (tp, or etp for an expert)."""
    target: Side = 1 if param.shard.axis is None else size
    gathers = source.gathers(param, target)
    return gathers[0 if param.shard.axis is None else rank], source.parts(param)


def read_shard(source: ModelSource, param: Param, rank: int = 0, size: int = 1) -> NumpyArray:
    """Return the shard of ``param`` on ``rank`` of ``size`` (tp, or etp for an expert), as a fresh array.

    Vocabulary rows beyond the true ones are zero. Pass ``alias_of``'s parameter for a tied output layer.
    """
    gather, parts = plan_shard(source, param, rank, size)
    return apply_gather(gather, [part.flat() for part in parts])


def apply_gather(gather: Gather, flats: "Sequence[NumpyArray]") -> NumpyArray:
    """Copy the flat parts as ``gather`` says, into a fresh array."""
    import numpy as np

    out = np.empty(gather.size, flats[0].dtype)
    for start, stop in gather.zeros:
        out[start:stop] = 0
    for move in gather.moves:
        copy_move(flats[move.part], out, move)
    return out.reshape(gather.shape)


def copy_move(source: NumpyArray, target: NumpyArray, move: Move) -> None:
    """Carry out one move between flat arrays."""
    import numpy as np

    views = []
    for flat, start, stride, step, span in (
        (source, move.source, move.source_stride, move.source_step, move.source_span),
        (target, move.target, move.target_stride, move.target_step, move.target_span),
    ):
        touched = flat[start : start + span]
        strides = (stride * flat.itemsize, step * flat.itemsize)
        views.append(np.lib.stride_tricks.as_strided(touched, (move.repeat, move.run), strides))
    np.copyto(views[1], views[0])


def require_full_shape(param: Param, whole: Shape, config: McaModelConfig, where: Path) -> None:
    """Raise unless ``whole`` is the shape that ``config`` gives ``param``."""
    expected = full_shape(param, config)
    if whole != expected:
        raise McaError(
            f"{where}: {param.mca_name()} has shape {list(whole)}; the configuration says {list(expected)}"
        )


def param_part_shapes(param: Param, whole: Shape, side: Side) -> tuple[Shape, ...]:
    """``part_shapes`` with an error that names the parameter."""
    try:
        return part_shapes(Rule.from_param(param), whole, side)
    except ValueError as error:
        raise McaError(f"{param.mca_name()} of shape {list(whole)}: {error}") from None


def checked_parts(
    param: Param, whole: Shape, side: Side, infos: Sequence[TensorInfo | ComputedTensor], experts: int
) -> tuple[Part, ...]:
    """The parts of ``param`` in ``infos``, whose shapes must be those that its rule demands.

    Args:
        param: The parameter.
        whole: Its whole shape.
        side: What ``infos`` are.
        infos: Its tensors in the side's order.
        experts: Leading size of stacked tensors.
    """
    shapes = param_part_shapes(param, whole, side)
    stacked = param.stacked and side is None
    parts = []
    for info, shape in zip(infos, shapes, strict=True):
        expected = (experts, *shape) if stacked else shape
        if info.shape != expected:
            raise McaError(
                f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected {list(expected)}"
            )
        parts.append(Part(info, shape, (param.expert or 0) * prod(shape) if stacked else 0))
    return tuple(parts)


def require_same_names(
    present: Iterable[str],
    expected: Iterable[str],
    where: Path,
    both: str = "the checkpoint and its config.json",
) -> None:
    """Raise one error with all missing and unexpected names: their count and the first few.

    Args:
        present: Those that are there.
        expected: Those that must be.
        where: The file or directory.
        both: Which two do not agree.
    """
    if faults := name_differences(present, expected):
        raise McaError(f"{where}: {faults}; {both} do not agree")


def name_differences(present: Iterable[str], expected: Iterable[str], noun: str = "tensor") -> str:
    """All missing and unexpected names, their count and the first few; empty if there are none."""
    have, want = set(present), set(expected)
    return " and ".join(
        f"{counted(len(names), f'{what} {noun}')} ({first_few(names)})"
        for what, names in (("missing", want - have), ("unexpected", have - want))
        if names
    )


def first_few(names: Iterable[str], count: int = 4) -> str:
    """The first of ``names``, sorted."""
    listed = sorted(names)
    return ", ".join(listed[:count]) + (", ..." if len(listed) > count else "")
