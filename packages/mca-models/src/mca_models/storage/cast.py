"""Element-wise casts to the dtype that is written; a finite number never becomes an infinite one.

Callers choose the dtype.
"""

from mca_config.errors import McaError
from mca_models.storage.finite import all_finite, non_finite
from mca_models.weights.arrays import NumpyArray

_NARROW = {
    "float16": "fp16, whose largest value is 65504; use bf16 or fp32",
    "bfloat16": "bf16, whose largest value is 3.39e38; use fp32",
    "float32": "fp32, whose largest value is 3.40e38; leave the weights as they are",
}
"""By the target's name: its largest value, and what does not overflow."""
_WIDE_ENOUGH = {
    "float16": (),
    "bfloat16": ("float16",),
    "float32": ("float16", "bfloat16"),
    "float64": ("float16", "bfloat16", "float32"),
}
"""Sources that cannot overflow."""


def cast_into(source: NumpyArray, target: NumpyArray, name: str) -> None:
    """Cast ``source`` into ``target``, both of one shape.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        rounds_twice = (source.dtype.name, target.dtype.name) == ("float64", "bfloat16")
        np.copyto(target, round_to_odd(source) if rounds_twice else source, casting="unsafe")
    if can_overflow(source.dtype.name, target.dtype.name):
        _require_finite(source, target, name)


def round_to_odd(source: NumpyArray) -> NumpyArray:
    """Return fp64 ``source`` in fp32, the odd one of the two neighbours where it is not exact.

    Rounding the result to a narrower type then gives what rounding ``source`` once does.
    """
    import numpy as np

    nearest = source.astype(np.float32)
    exact = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(exact) > np.abs(source)  # towards zero
    bits |= (exact != source) & ~np.isnan(source)
    return nearest


def can_overflow(source: str, target: str) -> bool:
    """Return whether a finite number of dtype ``source`` may become infinite in ``target`` (NumPy's names)."""
    return target in _NARROW and source not in (target, *_WIDE_ENOUGH[target])


def _require_finite(source: NumpyArray, target: NumpyArray, name: str) -> None:
    if all_finite(target):
        return
    overflowed = source[overflows(source, target)]
    if overflowed.size:
        raise overflow(name, f"{float(overflowed[0]):g}", target.dtype.name)


def overflows(source: NumpyArray, target: NumpyArray) -> NumpyArray:
    """Return the mask of the finite elements of ``source`` that its cast to ``target`` made infinite."""
    import numpy as np

    mask = non_finite(target)
    mask[mask] = np.isfinite(source[mask].astype(np.float64))
    return mask


def overflow(name: str, value: str, kind: str) -> "Overflow":
    """Return the error for ``value`` of tensor ``name``, which is too large for dtype ``kind`` (NumPy's name)."""
    return Overflow(f"tensor {name}: {value} overflows {too_narrow(kind)}")


def too_narrow(kind: str) -> str:
    """Return the dtype with NumPy's name ``kind``, its largest value, and what to use instead."""
    return _NARROW[kind]


class Overflow(McaError):
    """A cast makes a finite value infinite."""
