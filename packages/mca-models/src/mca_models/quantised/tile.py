"""Some blocks of a weight made e4m3, in scratch memory that stays in a core's cache.

numpy has no fast cast to e4m3, and looks things up ten times slower than it adds. So a quotient is rounded by adding
the power of two whose last bit is the step between e4m3 numbers there: the sum's last bits then count these steps.
What a block and its scale are is said in `blocks`.
"""

import numpy as np

from mca_models.storage.dtypes import numpy_dtype
from mca_models.weights.arrays import NumpyArray

BLOCK = 128
LARGEST = 448.0
"""The largest e4m3 number."""

_WIDTH = 8 * BLOCK  # four bytes of 128 x 1024 elements, twice: a core's second cache
_EXPONENT, _SIGNLESS = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_LOWEST = np.uint32(121 << 23)  # 2^-6: the step is the same below it
_RAISED = np.uint32(20 << 23)  # from the exponent of a number to that whose last bit is its step
_CODE_OF_LOWEST = (121 + 20) << 3


class Tile:
    """Scratch for `BLOCK` rows and some columns.

    Args:
        columns: Of the weight.
    """

    def __init__(self, columns: int) -> None:
        self.width = min(columns + -columns % BLOCK, _WIDTH)
        size = BLOCK * self.width
        self._wide, self._bits = np.empty(size, np.uint32), np.empty(size, np.uint32)
        self._lowest = np.full(size, _LOWEST)  # numpy is ten times slower with a number instead
        self._codes, self._more = np.empty(size, np.uint8), np.empty(size, np.uint8)

    def quantise(self, weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
        """At most as many rows and columns of one matrix.

        Args:
            weight: Them.
            values: Where their e4m3 numbers go, as bytes.
            scales: Where those of their blocks go.
        """
        shape, columns, size = weight.shape, weight.shape[1], weight.size
        wide, bits = self._wide[:size], self._bits[:size]
        _widen(weight, wide.reshape(shape))
        np.bitwise_and(wide, _SIGNLESS, out=bits)  # ordered as the numbers are, NaN last
        largest = np.zeros(len(scales) * BLOCK, np.uint32)
        bits.reshape(shape).max(0, out=largest[:columns])
        blocks = largest.reshape(-1, BLOCK).max(1).view(np.float32)
        np.divide(blocks, np.float32(LARGEST), out=scales)
        scales[blocks == 0] = 1.0
        signs, codes = self._more[:size], self._codes[:size]
        with np.errstate(invalid="ignore", over="ignore"):  # told by the scales
            quotients = bits.view(np.float32).reshape(shape)
            quotients /= np.repeat(scales, BLOCK)[:columns]
            wide >>= 24
            np.copyto(signs, wide, casting="unsafe")
            signs &= 0x80
            np.bitwise_and(bits, _EXPONENT, out=wide)
            np.maximum(wide, self._lowest[:size], out=wide)
            wide += _RAISED
            bits.view(np.float32)[...] += wide.view(np.float32)
        wide >>= 20
        bits += wide  # steps within an exponent, and eight for each exponent below
        np.copyto(codes, bits, casting="unsafe")
        codes -= np.uint8(_CODE_OF_LOWEST & 0xFF)
        np.bitwise_or(codes.reshape(shape), signs.reshape(shape), out=values)


def _widen(weight: NumpyArray, out: NumpyArray) -> None:
    """To the bits of fp32; bfloat16 by its own, several times faster than ``ml_dtypes``."""
    if weight.dtype == numpy_dtype("BF16"):
        np.copyto(out, weight.view(np.uint16))
        out <<= 16
    else:
        out.view(np.float32)[...] = weight
