"""Receiver of named tensors, in any order and in pieces, that tracks missing, duplicate and wrong ones.

`load` and `mca_models.megatron.peft.exchange` use the complete tensors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mca_config.errors import McaError, RankFailed, raise_problems
from mca_models.megatron.distributed.collectives import run_on_all_ranks
from mca_models.megatron.tensors import CODES
from mca_models.storage.byte_ranges import Shape
from mca_models.storage.source import name_differences

Weight = tuple[str, Tensor] | tuple[str, Tensor, int]
"""Name and tensor; or name, some rows of the tensor, and the index of the first of them."""

_SHOWN = 8


def load_on_all_ranks(receive: Callable[[], None]) -> None:
    """Run ``receive`` on all ranks; if it fails on one, all raise. Collective.

    Raises:
        McaError: Names the first rank that failed, with its error.
    """
    try:
        run_on_all_ranks(receive)
    except RankFailed as error:
        raise McaError(f"rank {error.rank} could not load the weights: {error.cause}") from error


@dataclass
class _TensorProgress:
    """Received parts of a tensor.

    Args:
        shape: Expected shape.
        rows: Number of received rows.
        ranges: First row and end of each received piece.
        parts: Buffer in which this rank joins pieces.
    """

    shape: Shape
    rows: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    parts: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Return whether all rows were received."""
        return self.rows == (self.shape[0] if self.shape else 1)


class WeightReceiver:
    """Expected and received tensors.

    Args:
        required: Names and shapes of required tensors.
        optional: Names and shapes of optional tensors.
    """

    def __init__(self, required: Mapping[str, Shape], optional: Mapping[str, Shape]) -> None:
        self._required = tuple(required)
        self._all = {name: _TensorProgress(shape) for name, shape in {**optional, **required}.items()}
        self._problems: list[str] = []

    def expected_shape(self, name: str) -> Shape | None:
        """Return the shape that tensor ``name`` must have; None: it is not expected."""
        progress = self._all.get(name)
        return None if progress is None else progress.shape

    def is_complete(self, name: str) -> bool:
        """Return whether all of tensor ``name`` was received."""
        return self._all[name].complete

    def receive(self, name: str, tensor: Tensor, start: int | None, *, keep: bool = True) -> Tensor | None:
        """Receive a tensor, or its rows from ``start`` on; `finish` reports problems.

        Args:
            name: Name of the tensor.
            tensor: The tensor; its sender may reuse the memory after the call.
            start: The first row; None: the full tensor.
            keep: Whether this rank needs it.

        Returns:
            The full tensor, if it is complete and ``keep`` is true.
        """
        if (progress := self._all.get(name)) is None:
            self._problems.append(f"1 unexpected tensor ({name})")
            return None
        if fault := _fault(progress, tensor, start) or (dtype_fault(tensor) if keep else None):
            self.report(name, f"{name} {fault}")
            return None
        first, rows = start or 0, tensor.shape[0] if tensor.dim() else 1
        if any(first < stop and begin < first + rows for begin, stop in progress.ranges):
            self._problems.append(f"{name} came twice")
            return None
        progress.ranges.append((first, first + rows))
        progress.rows += rows
        return _joined(progress, tensor, first) if keep else None

    def report(self, name: str, problem: str) -> None:
        """Record ``problem`` of tensor ``name``, which is then not reported as missing."""
        self._problems.append(problem)
        if (progress := self._all.get(name)) is not None:
            progress.rows = progress.shape[0] if progress.shape else 1

    def finish(self) -> None:
        """Raise one error with all problems and missing tensors."""
        received = [name for name in self._required if self._all[name].complete]
        missing = name_differences(received, self._required)
        raise_problems([*self._problems, *([missing] if missing else [])], "the weights", shown=_SHOWN)


def dtype_fault(tensor: Tensor) -> str | None:
    """Return why the dtype of ``tensor`` is not supported; None if it is."""
    if tensor.dtype in CODES:
        return None
    found, *expected = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *CODES))
    return f"has dtype {found}, expected {', '.join(expected)}"


def _fault(progress: _TensorProgress, tensor: Tensor, start: int | None) -> str | None:
    shape, first = tuple(tensor.shape), start or 0
    fits = shape[1:] == progress.shape[1:] and len(shape) == len(progress.shape)
    if fits and shape:
        fits = 0 <= first <= first + shape[0] <= progress.shape[0]
    if fits and (start is not None or shape == progress.shape):
        return None
    rows = "" if start is None else f" from row {start} on"
    return f"has shape {list(shape)}{rows}, expected {list(progress.shape)}"


def _joined(progress: _TensorProgress, tensor: Tensor, first: int) -> Tensor | None:
    if tuple(tensor.shape) == progress.shape:
        return tensor
    if progress.parts is None:
        progress.parts = torch.empty(progress.shape, dtype=tensor.dtype, device=tensor.device)
    progress.parts[first : first + len(tensor)] = tensor
    if not progress.complete:
        return None
    whole, progress.parts = progress.parts, None
    return whole


def receive_all(weights: Iterable[Weight], receive: Callable[[str, Tensor, int | None], None]) -> None:
    """Call ``receive`` for each of ``weights``."""
    for name, tensor, *start in weights:
        receive(name, tensor, start[0] if start else None)
