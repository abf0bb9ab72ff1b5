"""Blocks of fp8 with a scale each, made of weights: what published fp8 checkpoints of DeepSeek and Qwen hold.

A block is 128 rows by 128 columns of a linear's weight; the last ones may be smaller. Its scale is its largest
magnitude over 448, the largest e4m3 number, in fp32 (1 for a block of zeros), and its values are the weights divided by
that, rounded to the nearest e4m3. `fp8` reads them. The same is done on devices in `mca_models.megatron.state.fp8`.
"""

from functools import cache
from math import prod

import numpy as np

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.quantised.fp8 import FP8
from mca_models.storage.dtypes import numpy_dtype
from mca_models.weights.arrays import NumpyArray

BLOCK = 128
LARGEST = 448.0
CODE = FP8[0]
"""Safetensors code of the values."""
SCALE_CODE = "F32"
"""That of the scales."""


def quantised(name: str, weight: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """e4m3 values like ``weight`` ``[..., rows, columns]``, and fp32 scales ``[..., row blocks, column blocks]``.

    Raises:
        McaError: Tensor ``name`` has a value that is not finite.
    """
    rows, columns = weight.shape[-2:]
    values = np.empty(weight.shape, numpy_dtype(CODE))
    scales = np.empty(scale_shape(weight.shape), np.float32)
    matrices = weight.reshape(-1, rows, columns), values.reshape(-1, rows, columns)
    grids = scales.reshape(-1, *scales.shape[-2:])
    for matrix, out, grid in zip(*matrices, grids, strict=True):
        for band in range(len(grid)):
            cut = slice(band * BLOCK, (band + 1) * BLOCK)
            _quantise(matrix[cut], out[cut], grid[band])
    if not np.isfinite(scales).all():
        raise not_finite(name)
    return values, scales


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def not_finite(name: str) -> McaError:
    """What to raise where tensor ``name`` has an infinite value, or one that is no number."""
    return McaError(f"tensor {name} has values that are not finite; it cannot be written as fp8")


def quantisation_config(left_out: list[str]) -> JsonObject:
    """``quantization_config`` of ``config.json``.

    Args:
        left_out: Modules that look like linears and are not quantised.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left_out,
    }


def _quantise(weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
    """At most `BLOCK` rows of one matrix."""
    rows, columns = weight.shape
    work = np.zeros((rows, prod(scales.shape) * BLOCK), np.float32)
    _widen(weight, work[:, :columns])
    magnitudes = work.view(np.uint32) & np.uint32(0x7FFFFFFF)  # ordered as the numbers are, NaN last
    largest = magnitudes.max(0).reshape(-1, BLOCK).max(1).view(np.float32)
    np.divide(largest, np.float32(LARGEST), out=scales)
    scales[largest == 0] = 1.0
    blocks = work.reshape(rows, -1, BLOCK)
    with np.errstate(invalid="ignore"):  # told by the scales
        blocks /= scales[:, None]
    values[...] = _rounded(work)[:, :columns]


def _widen(weight: NumpyArray, out: NumpyArray) -> None:
    """To fp32; bfloat16 by its bits, several times faster than ``ml_dtypes``."""
    if weight.dtype == numpy_dtype("BF16"):
        np.left_shift(weight.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = weight


def _rounded(x: NumpyArray) -> NumpyArray:
    """fp32 to the nearest e4m3, ties to even, by a table of the upper halves of fp32 numbers.

    The last bit of such a half is set where the lower half has any: so nothing lies on a tie that does not in fp32.
    """
    bits = x.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    upper |= (bits & np.uint32(0xFFFF)) != 0
    rounded: NumpyArray = _table().take(upper)
    return rounded.view(numpy_dtype(CODE))


@cache
def _table() -> NumpyArray:
    """The e4m3 number, as a byte, of each upper half of an fp32 number."""
    uppers = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        table: NumpyArray = uppers.astype(numpy_dtype(CODE)).view(np.uint8)
    return table
