"""fp8 weights with a scale for each block, dequantised row by row as they are read.

Hugging Face stores a quantised ``weight`` [rows, columns] in e4m3, and ``weight_scale_inv``
[ceil(rows / 128), ceil(columns / 128)]: element (i, j) is ``weight * scale[i // 128, j // 128]``,
multiplied in fp32. The last block of a row or column may be narrower. Stacked experts have one more axis
in front of both; a scale of one element is the whole tensor's.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mca_config.errors import McaError
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.lazy_tensor import FlatRows, LazyTensorBase, Shape
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.values import cast_into
from mca_models.weights.arrays import NumpyArray

FP8 = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIX = "_scale_inv"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_STEP = 1 << 18  # elements that are fp32 at a time


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
