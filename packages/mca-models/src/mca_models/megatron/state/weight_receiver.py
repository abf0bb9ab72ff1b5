"""Tensors that come by name, in any order and in pieces: which have come, which are missing, and what was wrong.

What becomes of a tensor is decided by who takes it (`load`, `mca_models.megatron.peft.received`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mca_config.errors import McaError, RankFailed, raise_problems
from mca_models.megatron.distributed.collectives import together
from mca_models.megatron.tensors import CODES
from mca_models.storage.runs import Shape
from mca_models.storage.source import different_names

Weight = tuple[str, Tensor] | tuple[str, Tensor, int]
"""Name and tensor; or name, some rows of the tensor, and which of its rows the first of them is."""

_SHOWN = 8


def on_every_rank(take: Callable[[], None]) -> None:
    """Runs ``take``, in which a rank takes weights; where it fails on one, all say so. Collective.

    Raises:
        McaError: Names the first rank that failed, and why.
    """
    try:
        together(take)
    except RankFailed as error:
        raise McaError(f"rank {error.rank} could not load the weights: {error.cause}") from error


@dataclass
class _Arrived:
    """What has come of a tensor.

    Args:
        shape: That it must have.
        rows: How many of its rows have come.
        ranges: First row of each piece that has come, and the row behind its last.
        parts: Where they came in pieces, those that this rank has to put together.
    """

    shape: Shape
    rows: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    parts: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return self.rows == (self.shape[0] if self.shape else 1)


class Arrivals:
    """The tensors that are wanted, and those that have come.

    Args:
        required: Names and shapes of those that must come.
        optional: Of those that may.
    """

    def __init__(self, required: Mapping[str, Shape], optional: Mapping[str, Shape]) -> None:
        self._required = tuple(required)
        self._all = {name: _Arrived(shape) for name, shape in {**optional, **required}.items()}
        self._problems: list[str] = []

    def shape_of(self, name: str) -> Shape | None:
        """The shape that tensor ``name`` must have; None: there is none of that name."""
        arrived = self._all.get(name)
        return None if arrived is None else arrived.shape

    def is_complete(self, name: str) -> bool:
        """Whether all of tensor ``name`` has come."""
        return self._all[name].complete

    def take(self, name: str, tensor: Tensor, start: int | None, *, keep: bool = True) -> Tensor | None:
        """A tensor, or its rows from ``start`` on; what is wrong with it is reported by `finish`.

        Args:
            name: Of the tensor.
            tensor: Its sender may use the memory again afterwards.
            start: The first row; None: it is whole.
            keep: Whether this rank needs it.

        Returns:
            The whole tensor, if this completed it and it is to be kept.
        """
        if (arrived := self._all.get(name)) is None:
            self._problems.append(f"1 unexpected tensor ({name})")
            return None
        if fault := _fault(arrived, tensor, start) or (dtype_fault(tensor) if keep else None):
            self.refuse(name, f"{name} {fault}")
            return None
        first, rows = start or 0, tensor.shape[0] if tensor.dim() else 1
        if any(first < stop and begin < first + rows for begin, stop in arrived.ranges):
            self._problems.append(f"{name} came twice")
            return None
        arrived.ranges.append((first, first + rows))
        arrived.rows += rows
        return _joined(arrived, tensor, first) if keep else None

    def refuse(self, name: str, problem: str) -> None:
        """``problem`` of tensor ``name``, which is not missing too."""
        self._problems.append(problem)
        if (arrived := self._all.get(name)) is not None:
            arrived.rows = arrived.shape[0] if arrived.shape else 1

    def finish(self) -> None:
        """Raises one error with all that was wrong, or is missing."""
        come = [name for name in self._required if self._all[name].complete]
        missing = different_names(come, self._required)
        raise_problems([*self._problems, *([missing] if missing else [])], "the weights", shown=_SHOWN)


def dtype_fault(tensor: Tensor) -> str | None:
    """Why ``tensor`` cannot be a weight, in words: its elements are of another type; None: they are not."""
    if tensor.dtype in CODES:
        return None
    found, *expected = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *CODES))
    return f"has dtype {found}, expected {', '.join(expected)}"


def _fault(arrived: _Arrived, tensor: Tensor, start: int | None) -> str | None:
    shape, first = tuple(tensor.shape), start or 0
    fits = shape[1:] == arrived.shape[1:] and len(shape) == len(arrived.shape)
    if fits and shape:
        fits = 0 <= first <= first + shape[0] <= arrived.shape[0]
    if fits and (start is not None or shape == arrived.shape):
        return None
    rows = "" if start is None else f" from row {start} on"
    return f"has shape {list(shape)}{rows}, expected {list(arrived.shape)}"


def _joined(arrived: _Arrived, tensor: Tensor, first: int) -> Tensor | None:
    if tuple(tensor.shape) == arrived.shape:
        return tensor
    if arrived.parts is None:
        arrived.parts = torch.empty(arrived.shape, dtype=tensor.dtype, device=tensor.device)
    arrived.parts[first : first + len(tensor)] = tensor
    if not arrived.complete:
        return None
    whole, arrived.parts = arrived.parts, None
    return whole


def taken(weights: Iterable[Weight], take: Callable[[str, Tensor, int | None], None]) -> None:
    """Gives each of ``weights`` to ``take``."""
    for name, tensor, *start in weights:
        take(name, tensor, start[0] if start else None)
