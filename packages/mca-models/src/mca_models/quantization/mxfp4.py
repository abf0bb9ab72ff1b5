"""gpt-oss experts in mxfp4, dequantised as they are read.

A parameter ``X`` [experts, in, out] is stored as

    X_blocks   uint8 [experts, out, in / 32, 16]   two numbers in a byte, the lower half first
    X_scales   uint8 [experts, out, in / 32]       an exponent for 32 numbers, biased by 127

A half byte is sign, two exponent bits and one mantissa bit (e2m1). The stored tensors have the output
features before the input features, the parameter that ``transformers`` makes of them the other way round.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mca_config.errors import McaError
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.lazy_tensor import FlatRows, LazyTensorBase, Shape
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.values import overflow
from mca_models.weights.arrays import NumpyArray

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], 1)  # by byte: lower half, upper half
_STEP = 1 << 18  # elements that are unpacked at a time


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(LazyTensorBase):
    """A packed parameter that reads as [experts, in, out].

    Args:
        blocks: ``..._blocks``.
        scales: ``..._scales``.
        dtype: Safetensors code of what is read.
    """

    blocks: TensorInfo
    scales: TensorInfo
    dtype: str

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.blocks.name.removesuffix(BLOCKS)

    @property
    def shape(self) -> Shape:
        """Shape of the parameter: [experts, in, out]."""
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * GROUP, outputs

    @property
    def file(self) -> Path:
        """File of the blocks."""
        return self.blocks.file

    def read(self, start: int = 0, stop: int | None = None) -> NumpyArray:
        """Experts ``start:stop``."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        out = self.read_rows(start * self.shape[1], max(start, stop) * self.shape[1])
        return out.reshape(-1, *self.shape[1:])

    def flat(self) -> FlatRows:
        """All elements in one axis; a slice unpacks the groups of rows that it touches."""
        return FlatRows(self, self.read_rows, self.shape[-1])

    def read_rows(self, start: int, stop: int) -> NumpyArray:
        """Input features ``start:stop``, those of all experts counted through: [stop - start, out]."""
        out = np.empty((stop - start, self.shape[2]), numpy_dtype(self.dtype))
        row = start
        while row < stop:
            expert, inside = divmod(row, self.shape[1])
            end = min(self.shape[1], inside + stop - row)
            self._unpack(out[row - start : row - start + end - inside], expert, inside, end)
            row += end - inside
        return out

    def _unpack(self, out: NumpyArray, expert: int, start: int, stop: int) -> None:
        """Write input features ``start:stop`` of one expert to ``out``."""
        first, last = start // GROUP, -(-stop // GROUP)
        blocks = self.blocks.array()[expert, :, first:last]
        scales = self.scales.array()[expert, :, first:last].view(np.uint8)
        table = _pairs(self.dtype)
        step = max(1, _STEP // ((last - first) * GROUP))
        inside = slice(start - first * GROUP, stop - first * GROUP)
        for at in range(0, self.shape[2], step):
            rows = slice(at, at + step)
            pairs = table[(scales[rows].astype(np.int32) << 8)[..., None] + blocks[rows]]
            values = pairs.view(out.dtype).reshape(len(pairs), -1)
            if self.dtype == "F16" and np.isinf(values).any():
                raise overflow(self.name, "a value", "float16")
            out[:, rows] = np.ascontiguousarray(values[:, inside].T)


@cache
def _pairs(dtype: str) -> NumpyArray:
    """Both numbers of a byte as one integer, at ``scale * 256 + byte``."""
    exponents = np.arange(256)[:, None, None] - 127
    with np.errstate(over="ignore"):
        values = np.ldexp(_PAIRS, exponents).astype(numpy_dtype(dtype))
    return values.reshape(256 * 256, 2).view(np.uint64 if dtype == "F32" else np.uint32)[:, 0]


def mxfp4_tensor(blocks: TensorInfo, scales: TensorInfo, dtype: str) -> Mxfp4Tensor:
    """The parameter that ``blocks`` and ``scales`` make up.

    Raises:
        McaError: The two do not fit together.
    """
    packed = blocks.shape
    if blocks.dtype != "U8" or len(packed) != 4 or packed[-1] != GROUP // 2:
        raise McaError(
            f"{blocks.file}: {blocks.name} is {blocks.dtype} {list(packed)}; expected U8 of "
            "[experts, out, in / 32, 16]"
        )
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != packed[:-1]:
        raise McaError(
            f"{scales.file}: {scales.name} is {scales.dtype} {list(scales.shape)}; {blocks.name} needs U8 "
            f"{list(packed[:-1])}"
        )
    return Mxfp4Tensor(blocks, scales, dtype)
