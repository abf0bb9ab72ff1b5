"""Element-wise casts of what passes through a buffer."""

from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError

if TYPE_CHECKING:
    import numpy as np


def cast_into(source: "np.ndarray[Any, Any]", target: "np.ndarray[Any, Any]", name: str) -> None:
    """Casts ``source`` into ``target``, both flat and of one size.

    Raises:
        McaError: A finite value of tensor ``name`` becomes infinite.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
    if target.dtype == np.float16:
        _require_finite(source, target, name)


def _require_finite(source: "np.ndarray[Any, Any]", target: "np.ndarray[Any, Any]", name: str) -> None:
    import numpy as np

    bits = target.view(np.uint16) & 0x7FFF
    infinite = np.flatnonzero(bits == 0x7C00)
    for index in infinite.tolist():
        value = float(source[index])
        if np.isfinite(value):
            raise McaError(
                f"tensor {name}: {value:g} overflows fp16, whose largest value is 65504; use --bf16 or --fp32"
            )
