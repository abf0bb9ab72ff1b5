"""Values of tensors: fast checks for infinite and NaN ones, and casts that never make a finite number infinite."""

from collections.abc import Iterable, Mapping

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_models.weights.arrays import NumpyArray

WORDS = "that are not finite (infinite or NaN)"
INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
    "float8_e4m3fn": 0x7F,
}
"""Bits of infinity by NumPy's name of the type; all bits of the exponent, and no others. In e4m3 they are those of NaN,
as it has no infinity."""


def all_finite(values: NumpyArray) -> bool:
    """Return whether no element of the contiguous ``values`` is infinite or NaN.

    It costs one pass of 13 ms a GB, and two more where a magnitude is 2 or above.
    """
    import numpy as np

    infinity, width = INFINITY[values.dtype.name], 8 * values.itemsize
    bits = values.view(f"u{values.itemsize}")
    if not int(np.bitwise_or.reduce(bits, axis=None)) & 1 << width - 2:  # of exponents; below 2 it is not set
        return True
    signed = bits.view(f"i{values.itemsize}")  # where all negative numbers are below the positive ones
    return int(signed.max()) < infinity and int(bits.max()) < infinity | 1 << width - 1


def non_finite(values: NumpyArray) -> NumpyArray:
    """Return the mask of the infinite and NaN elements of ``values``."""
    infinity = INFINITY[values.dtype.name]
    mask: NumpyArray = values.view(f"u{values.itemsize}") & infinity == infinity
    return mask


def counts_in(tensors: Iterable[tuple[str, NumpyArray]]) -> dict[str, int]:
    """Return the number of infinite and NaN elements of each of the floating-point ``tensors`` that has any."""
    found = {}
    for name, values in tensors:
        if values.dtype.name in INFINITY and not all_finite(values):
            found[name] = int(non_finite(values).sum())
    return found


def named_counts(counts: Mapping[str, int], shown: int = 4) -> str:
    """Return how many tensors have such values, and the first of them."""
    first = ", ".join(f"{name} ({counted(number, 'value')})" for name, number in list(counts.items())[:shown])
    more = f" and {len(counts) - shown} more" if len(counts) > shown else ""
    verb = "has" if len(counts) == 1 else "have"
    return f"{counted(len(counts), 'tensor')} {verb} values {WORDS}: {first}{more}"


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
