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

WIDTH = 8 * BLOCK
"""Columns at a time: four bytes of 128 x 1024 elements, twice, are a core's second cache."""

TILE_BYTES = BLOCK * WIDTH * (3 * 4 + 2)
"""Memory of a `Tile`."""
_EXPONENT, _SIGNLESS, _SIGNLESS_HALF = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)
_LOWEST = np.float32(2**-6)  # the step is the same below it
_RAISED = np.uint32(20 << 23)  # from the exponent of a number to that whose last bit is its step
_CODE_OF_LOWEST = (121 + 20) << 3


class Tile:
    """Scratch for `BLOCK` rows and `WIDTH` columns."""

    def __init__(self) -> None:
        size = BLOCK * WIDTH
        self._wide, self._bits = np.empty(size, np.uint32), np.empty(size, np.uint32)
        self._lowest = np.full(size, _LOWEST)  # numpy is ten times slower with a number instead
        self._codes, self._signs = np.empty(size, np.uint8), np.empty(size, np.uint8)

    def quantise(self, weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
        """At most as many rows and columns of one matrix.

        Args:
            weight: Them.
            values: Where their e4m3 numbers go, as bytes.
            scales: Where those of their blocks go.
        """
        shape, columns, size = weight.shape, weight.shape[1], weight.size
        bits, wide = self._bits[:size], self._wide[:size]
        codes, signs = self._codes[:size], self._signs[:size]
        largest = np.zeros(len(scales) * BLOCK, np.uint32)
        largest[:columns] = self._take_apart(weight, bits, signs)
        blocks = largest.reshape(-1, BLOCK).max(1).view(np.float32)
        np.divide(blocks, np.float32(LARGEST), out=scales)
        scales[blocks == 0] = 1.0
        quotients, exponents = bits.view(np.float32), wide.view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # told by the scales
            rows = quotients.reshape(shape)
            rows /= np.repeat(scales, BLOCK)[:columns]
            np.bitwise_and(bits, _EXPONENT, out=wide)
            np.maximum(exponents, self._lowest[:size], out=exponents)
            wide += _RAISED
            quotients += exponents
        # steps within an exponent, and eight for each exponent below
        np.copyto(codes, bits, casting="unsafe")
        wide >>= 20
        steps = bits.view(np.uint8)[:size]
        np.copyto(steps, wide, casting="unsafe")
        codes += steps
        codes -= np.uint8(_CODE_OF_LOWEST & 0xFF)
        np.bitwise_or(codes.reshape(shape), signs.reshape(shape), out=values)

    def _take_apart(self, weight: NumpyArray, magnitudes: NumpyArray, signs: NumpyArray) -> NumpyArray:
        """The bits of fp32 without signs, and those; returns the largest of each column, as bits too.

        These are ordered as the numbers are, NaN last. bfloat16's own bits are several times faster than ``ml_dtypes``.
        """
        size, shape = weight.size, weight.shape
        if weight.dtype == numpy_dtype("BF16"):
            given, halves = weight.view(np.uint16), self._wide.view(np.uint16)[:size]
            np.right_shift(given, 8, out=halves.reshape(shape))
            np.copyto(signs, halves, casting="unsafe")
            np.bitwise_and(given, _SIGNLESS_HALF, out=halves.reshape(shape))
            largest: NumpyArray = halves.reshape(shape).max(0).astype(np.uint32) << 16
            np.copyto(magnitudes, halves)
            magnitudes <<= 16
        else:
            wide = self._wide[:size]
            wide.view(np.float32).reshape(shape)[...] = weight
            np.bitwise_and(wide, _SIGNLESS, out=magnitudes)
            largest = magnitudes.reshape(shape).max(0)
            wide >>= 24
            np.copyto(signs, wide, casting="unsafe")
        signs &= 0x80
        return largest
