"""Blocks of fp8 with a scale each, made of weights: what published fp8 checkpoints of DeepSeek and Qwen hold.

A block is 128 rows by 128 columns of a linear's weight; the last ones may be smaller. Its scale is its largest
magnitude over 448, the largest e4m3 number, in fp32: 1 for a block of zeros, else at least the smallest normal number.
Its values are the weights divided by that, rounded to the nearest e4m3. `fp8_read` reads them. On devices
`mca_models.megatron.state.fp8` does it.

numpy has no fast cast to e4m3, and looks things up ten times slower than it adds. So a quotient is rounded by adding
a power of two whose last bit is the step between e4m3 numbers there: the sum's last bits then count these steps. The
code of the exponent is put into the last bits of that power before, and so the sum's last byte is the whole code.
"""

from itertools import product

import numpy as np

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.quantization.fp8_read import FP8
from mca_models.storage.dtypes import numpy_dtype
from mca_models.weights.arrays import NumpyArray

BLOCK = 128
LARGEST = 448.0
"""The largest e4m3 number."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: with fewer bits in its scale the largest number would exceed 448, or be over 0."""
WIDTH = 8 * BLOCK
"""Columns at a time: four bytes of 128 x 1024 elements, twice, are a core's second cache."""
TILE_BYTES = BLOCK * WIDTH * (3 * 4 + 2)
"""Memory of a `Fp8Tile`."""
_SIGNLESS = np.uint32(0x7FFFFFFF)
_LOWEST = 127 - 6  # the exponent below which the step is the same
_CODED = np.uint32((1 << 23) + 8)  # an exponent is one of fp32's bits, and eight codes
_RAISED = np.uint32((20 << 23) - 8 * _LOWEST % 256)  # to where a number's last bit is the step; 0 is code 0


class Fp8Tile:
    """Scratch for `BLOCK` rows and `WIDTH` columns."""

    def __init__(self) -> None:
        size = BLOCK * WIDTH
        self._wide, self._bits = np.empty(size, np.uint32), np.empty(size, np.uint32)
        # numpy is several times slower with a number instead
        self._lowest = np.full(size, _LOWEST, np.uint32)
        self._codes, self._signs = np.empty(size, np.uint8), np.empty(size, np.uint8)

    def quantise(self, weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
        """Quantise at most as many rows and columns of one matrix as the tile has.

        Args:
            weight: Them.
            values: Where their e4m3 numbers go, as bytes.
            scales: Where those of their blocks go.
        """
        shape, columns, size = weight.shape, weight.shape[1], weight.size
        bits, wide, codes = self._bits[:size], self._wide[:size], self._codes[:size]
        wide.view(np.float32).reshape(shape)[...] = weight
        np.bitwise_and(wide, _SIGNLESS, out=bits)
        wide >>= 24
        signs = self._signs[:size]
        np.copyto(signs, wide, casting="unsafe")
        signs &= 0x80
        largest = np.zeros(len(scales) * BLOCK, np.uint32)
        largest[:columns] = bits.reshape(shape).max(0)  # ordered as the numbers are, NaN last
        tops = largest.reshape(-1, BLOCK).max(1).view(np.float32)
        np.divide(tops, np.float32(LARGEST), out=scales)
        np.maximum(scales, np.float32(SMALLEST_SCALE), out=scales)
        scales[tops == 0] = 1.0
        quotients = bits.view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # the scales show it
            rows = quotients.reshape(shape)
            rows /= np.repeat(scales, BLOCK)[:columns]
            np.right_shift(bits, 23, out=wide)
            np.maximum(wide, self._lowest[:size], out=wide)
            wide *= _CODED
            wide += _RAISED
            quotients += wide.view(np.float32)
        np.copyto(codes, bits, casting="unsafe")
        np.bitwise_or(codes.reshape(shape), signs.reshape(shape), out=values)


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
