"""The array operations a template needs, for any library with a NumPy-like interface.

Nothing here imports NumPy or Torch: the library is found from the array itself, so a process that
only ever sees NumPy arrays never loads Torch.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

Array = Any
"""``numpy.ndarray`` or ``torch.Tensor``: both give shape, reshape and basic slicing, and they have no common class."""

Contiguous = Any
"""An array or buffer whose bytes lie one after the other; ``collections.abc.Buffer`` is not in 3.11."""

if TYPE_CHECKING:
    import numpy as np

    NumpyArray = np.ndarray[Any, Any]
    NumpyDtype = np.dtype[Any]
else:
    NumpyArray = NumpyDtype = object  # NumPy is imported by those that compute


def namespace(x: Array) -> ModuleType:
    """The top-level module that owns ``x``: ``numpy`` or ``torch``."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def concat(parts: Sequence[Array], axis: int) -> Array:
    """Join ``parts`` along ``axis``; one part is returned as is, without a copy."""
    if len(parts) == 1:
        return parts[0]
    owner = namespace(parts[0])
    # numpy < 2 has only `concatenate`, torch has both
    return owner.concatenate(parts, axis)


def stack(parts: Sequence[Array]) -> Array:
    """``parts`` of one shape on a new axis 0."""
    return namespace(parts[0]).stack(parts, 0)


def cut(x: Array, axis: int, start: int, stop: int) -> Array:
    """A view of ``x[..., start:stop, ...]`` on ``axis``."""
    return x[(slice(None),) * axis + (slice(start, stop),)]


def split(x: Array, axis: int, sizes: Sequence[int]) -> tuple[Array, ...]:
    """Views of consecutive ``sizes`` along ``axis``; the sizes must add up."""
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"cannot split axis {axis} of shape {tuple(x.shape)} into {tuple(sizes)}")
    views, start = [], 0
    for size in sizes:
        views.append(cut(x, axis, start, start + size))
        start += size
    return tuple(views)


def split_ratio(x: Array, axis: int, ratio: tuple[int, ...]) -> tuple[Array, ...]:
    """Views of ``x`` along ``axis``, their lengths in the proportion ``ratio``."""
    unit, rest = divmod(x.shape[axis], sum(ratio))
    if rest:
        raise ValueError(f"axis {axis} of {tuple(x.shape)} does not divide in the ratio {ratio}")
    return split(x, axis, [unit * r for r in ratio])


def swap_axes(x: Array) -> Array:
    """``x`` with its last two axes exchanged (a view)."""
    axes = list(range(len(x.shape)))
    axes[-2:] = [axes[-1], axes[-2]]
    return x.transpose(axes) if namespace(x).__name__ == "numpy" else x.permute(axes)
