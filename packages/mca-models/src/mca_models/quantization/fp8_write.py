"""Blocks of fp8 with a scale each, made of weights: what published fp8 checkpoints of DeepSeek and Qwen hold.

A block is 128 rows by 128 columns of a linear's weight; the last ones may be smaller. Its scale is its largest
magnitude over 448, the largest e4m3 number, in fp32: 1 for a block of zeros, else at least the smallest normal number.
Its values are the weights divided by that, rounded to the nearest e4m3. `fp8_read` reads them. On devices
`mca_models.megatron.state.fp8_export` does it.
"""

from itertools import product

import numpy as np

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.quantization.fp8_read import FP8
from mca_models.quantization.fp8_tile import BLOCK, WIDTH, Fp8Tile
from mca_models.storage.dtypes import numpy_dtype
from mca_models.weights.arrays import NumpyArray

CODE = FP8[0]
"""Safetensors code of the values."""
SCALE_CODE = "F32"
"""Safetensors code of the scales."""


def quantize(
    name: str, weight: NumpyArray, values: NumpyArray | None = None, tile: Fp8Tile | None = None
) -> tuple[NumpyArray, NumpyArray]:
    """e4m3 values like ``weight`` ``[..., rows, columns]``, and fp32 scales ``[..., row blocks, column blocks]``.

    Args:
        name: Of the tensor.
        weight: It, or some of its matrices.
        values: Where the values go, as bytes; None: to new memory.
        tile: Scratch; None: new memory.

    Raises:
        McaError: Tensor ``name`` has a value that is not finite.
    """
    rows, columns = weight.shape[-2:]
    values = np.empty(weight.shape, np.uint8) if values is None else values.reshape(weight.shape)
    scales = np.empty(scale_shape(weight.shape), np.float32)
    matrices = weight.reshape(-1, rows, columns), values.reshape(-1, rows, columns)
    grids = scales.reshape(-1, *scales.shape[-2:])
    tile = tile or Fp8Tile()
    for matrix, out, grid in zip(*matrices, grids, strict=True):
        for band, start in product(range(len(grid)), range(0, columns, WIDTH)):
            cut = slice(band * BLOCK, (band + 1) * BLOCK), slice(start, start + WIDTH)
            first = start // BLOCK
            tile.quantise(matrix[cut], out[cut], grid[band, first : first + WIDTH // BLOCK])
    if not np.isfinite(scales).all():
        raise not_finite(name)
    return values.view(numpy_dtype(CODE)), scales


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def not_finite(name: str) -> McaError:
    """Return the error for tensor ``name`` with infinite or NaN values."""
    return McaError(f"tensor {name} has values that are not finite; it cannot be written as fp8")


def fp8_quantization_config(left_out: list[str]) -> JsonObject:
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
