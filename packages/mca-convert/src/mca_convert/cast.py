"""Element-wise casts of what passes through a buffer."""

from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError

if TYPE_CHECKING:
    import numpy as np

# by the target's name: bits of its infinity, its largest value, and what does not overflow
_NARROW = {
    "float16": (0x7C00, "fp16, whose largest value is 65504; use --bf16 or --fp32"),
    "bfloat16": (0x7F80, "bf16, whose largest value is 3.39e38; use --fp32"),
    "float32": (0x7F800000, "fp32, whose largest value is 3.40e38; leave the weights as they are"),
}
_WIDE_ENOUGH = {"float16": (), "bfloat16": ("float16",), "float32": ("float16", "bfloat16")}
"""Sources that cannot overflow."""


def cast_into(source: "np.ndarray[Any, Any]", target: "np.ndarray[Any, Any]", name: str) -> None:
    """Casts ``source`` into ``target``, both flat and of one size.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
    if source.dtype.name not in _WIDE_ENOUGH[target.dtype.name]:
        _require_finite(source, target, name)


def _require_finite(source: "np.ndarray[Any, Any]", target: "np.ndarray[Any, Any]", name: str) -> None:
    import numpy as np

    infinity, what = _NARROW[target.dtype.name]
    bits = target.view(f"u{target.itemsize}") & (1 << (8 * target.itemsize - 1)) - 1
    for index in np.flatnonzero(bits == infinity).tolist():
        value = float(source[index])
        if np.isfinite(value):
            raise McaError(f"tensor {name}: {value:g} overflows {what}")
