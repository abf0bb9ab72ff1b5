"""fp8 weights with a scale for each block: dequantised row by row as they are read, and made of weights.

Hugging Face stores a quantised ``weight`` [rows, columns] in e4m3, and ``weight_scale_inv``
[ceil(rows / 128), ceil(columns / 128)]: element (i, j) is ``weight * scale[i // 128, j // 128]``,
multiplied in fp32. The last block of a row or column may be narrower. Stacked experts have one more axis
in front of both; a scale of one element is the whole tensor's.

Written blocks are what published fp8 checkpoints of DeepSeek and Qwen hold. A block is 128 rows by 128 columns of a
linear's weight. Its scale is its largest magnitude over 448, the largest e4m3 number, in fp32: 1 for a block of zeros,
else at least the smallest normal number. Its values are the weights divided by that, rounded to the nearest e4m3. On
devices `mca_models.megatron.state.fp8` does it.

numpy has no fast cast to e4m3, and looks things up ten times slower than it adds. So a quotient is rounded by adding
a power of two whose last bit is the step between e4m3 numbers there: the sum's last bits then count these steps. The
code of the exponent is put into the last bits of that power before, and so the sum's last byte is the whole code.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.lazy_tensor import FlatRows, LazyTensorBase, Shape
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.values import cast_into
from mca_models.weights.arrays import NumpyArray

FP8 = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIX = "_scale_inv"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_STEP = 1 << 18  # elements that are fp32 at a time while reading


@dataclass(frozen=True, slots=True)
class Fp8Tensor(LazyTensorBase):
    """Quantised tensor that is dequantised as it is read.

    Args:
        weight: The stored fp8 numbers.
        scale: What they are multiplied with.
        block: Rows and columns that share a scale.
        dtype: Safetensors code of what is read: F32, BF16 or F16.
    """

    weight: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    dtype: str

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self.weight.name

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def file(self) -> Path:
        """File of the weight."""
        return self.weight.file

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Entries ``start:stop`` of axis 0."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        rows = prod(self.shape[1:-1])
        out = self.read_rows(start * rows, max(stop, start) * rows)
        return out.reshape(-1, *self.shape[1:])

    def flat(self) -> FlatRows:
        """All elements in one axis; a slice dequantises the rows that it touches."""
        return FlatRows(self, self.read_rows, self.shape[-1])

    def read_rows(self, start: int, stop: int) -> NumpyArray:
        """Rows ``start:stop``, those of all experts counted through."""
        weight = self.weight.array().reshape(-1, self.shape[-1]).view(np.uint8)
        scales = self._scales()
        out = np.empty((stop - start, self.shape[-1]), numpy_dtype(self.dtype))
        table = np.arange(256, dtype=np.uint8).view(numpy_dtype(self.weight.dtype)).astype(np.float32)
        step = max(1, _STEP // max(1, self.shape[-1]))
        row = start
        while row < stop:
            expert, inside = divmod(row, self.shape[-2])
            band = inside // self.block[0]
            end = min((band + 1) * self.block[0], self.shape[-2], inside + step, inside + stop - row)
            values = table[weight[row : row + end - inside]]
            with np.errstate(over="ignore", invalid="ignore"):  # the result shows it
                values *= np.repeat(scales[expert, band], self.block[1])[: self.shape[-1]]
            cast_into(values, out[row - start : row - start + end - inside], self.name)
            row += end - inside
        return out

    def _scales(self) -> NumpyArray:
        """[experts, row blocks, column blocks] in fp32."""
        stored = self.scale.array()
        if self.scale.dtype == "U8":  # bare exponents
            with np.errstate(over="ignore"):
                values = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        else:
            values = stored.astype(np.float32)
        experts = prod(self.shape[:-2])
        rows, columns = (-(-size // part) for size, part in zip(self.shape[-2:], self.block, strict=True))
        grid = (1, 1) if values.size == 1 else (rows, columns)
        return np.broadcast_to(values.reshape(-1, *grid), (experts, rows, columns))


def fp8_tensor(weight: TensorInfo, scale: TensorInfo, block: tuple[int, int] | None, dtype: str) -> Fp8Tensor:
    """``weight`` dequantised with ``scale``.

    Args:
        weight: In fp8.
        scale: Its ``..._scale_inv``.
        block: ``weight_block_size`` of config.json; None: one scale for the whole tensor.
        dtype: Safetensors code to read as.

    Raises:
        McaError: The two do not fit together.
    """
    where = f"{scale.file}: {scale.name}"
    if weight.dtype not in FP8 or len(weight.shape) < 2:
        raise McaError(
            f"{where} scales {weight.name}, which is {weight.dtype} {list(weight.shape)} and not fp8"
        )
    if scale.dtype not in _SCALES:
        raise McaError(f"{where} has dtype {scale.dtype}; expected one of {', '.join(_SCALES)}")
    if block is None or prod(scale.shape) == 1:
        expected: Shape = scale.shape
        if prod(scale.shape) != 1:
            raise McaError(
                f"{where} has shape {list(scale.shape)}, but config.json has no weight_block_size in its "
                "quantization_config"
            )
        block = (weight.shape[-2], weight.shape[-1])
    else:
        expected = (*weight.shape[:-2], -(-weight.shape[-2] // block[0]), -(-weight.shape[-1] // block[1]))
    if scale.shape != expected:
        raise McaError(
            f"{where} has shape {list(scale.shape)}; blocks of {block[0]} x {block[1]} of {weight.name} "
            f"{list(weight.shape)} need {list(expected)}"
        )
    return Fp8Tensor(weight, scale, block, dtype)


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
