"""Element-wise casts of what is read to the dtype that is written; a finite number never becomes an infinite one.

Which dtype is written is not decided here.
"""

from mca_config.errors import McaError
from mca_models.weights.arrays import NumpyArray

# by the target's name: bits of its infinity, its largest value, and what does not overflow
_NARROW = {
    "float16": (0x7C00, "fp16, whose largest value is 65504; use bf16 or fp32"),
    "bfloat16": (0x7F80, "bf16, whose largest value is 3.39e38; use fp32"),
    "float32": (0x7F800000, "fp32, whose largest value is 3.40e38; leave the weights as they are"),
}
_WIDE_ENOUGH = {
    "float16": (),
    "bfloat16": ("float16",),
    "float32": ("float16", "bfloat16"),
    "float64": ("float16", "bfloat16", "float32"),
}
"""Sources that cannot overflow."""


def cast_into(source: NumpyArray, target: NumpyArray, name: str) -> None:
    """Casts ``source`` into ``target``, both of one shape.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
    if can_overflow(source.dtype.name, target.dtype.name):
        _require_finite(source, target, name)


def can_overflow(source: str, target: str) -> bool:
    """Whether a finite number of dtype ``source`` may be infinite in ``target`` (NumPy's names, which are torch's)."""
    return target in _NARROW and source not in (target, *_WIDE_ENOUGH[target])


def _require_finite(source: NumpyArray, target: NumpyArray, name: str) -> None:
    import numpy as np

    kind = target.dtype.name
    bits = target.view(f"u{target.itemsize}") & (1 << (8 * target.itemsize - 1)) - 1
    for value in map(float, source[bits == _NARROW[kind][0]]):
        if np.isfinite(value):
            raise overflow(name, f"{value:g}", kind)


def overflow(name: str, value: str, kind: str) -> McaError:
    """What to raise where ``value`` of tensor ``name`` is too large for dtype ``kind`` (NumPy's name)."""
    return McaError(f"tensor {name}: {value} overflows {_NARROW[kind][1]}")
