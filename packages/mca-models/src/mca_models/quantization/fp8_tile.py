"""Some blocks of a weight made e4m3, in scratch memory that stays in a core's cache.

numpy has no fast cast to e4m3, and looks things up ten times slower than it adds. So a quotient is rounded by adding
a power of two whose last bit is the step between e4m3 numbers there: the sum's last bits then count these steps. The
code of the exponent is put into the last bits of that power before, and so the sum's last byte is the whole code.
`fp8_write` defines a block and its scale. `Bf16PairQuantizer` is a faster path for most bfloat16
blocks.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np

from mca_models.storage.dtypes import numpy_dtype
from mca_models.weights.arrays import NumpyArray

_PAIR_SIGNLESS, _SIGNS = np.uint32(0x7FFF7FFF), np.uint32(0x00800080)
_UPPER, _UPPER_CODE = np.uint32(0x7FFF0000), np.uint32(0x007F0000)
_HALF = np.uint32(1 << 19)  # of a step, of the bits of fp32
_SCALED = np.float32(2.0**120)
_ONE, _MANTISSA = 127, 0x7F  # exponent and mantissa of bfloat16's bits
_EXPONENTS = range(36, 141)
"""Range of a block's largest number in which its factor and all nonzero e4m3 values are in fp32's range."""
_BINADES = 20  # below the largest number's all is 0
_NEAR = (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, 6, 7, 8)  # last places from 2**-120 over a scale
BLOCK = 128
LARGEST = 448.0
"""The largest e4m3 number."""
WIDTH = 8 * BLOCK
"""Columns at a time: four bytes of 128 x 1024 elements, twice, are a core's second cache."""
TILE_BYTES = BLOCK * WIDTH * (3 * 4 + 2)
"""Memory of a `Fp8Tile`."""
_SIGNLESS = np.uint32(0x7FFFFFFF)
_LOWEST = 127 - 6  # the exponent below which the step is the same
_CODED = np.uint32((1 << 23) + 8)  # an exponent is one of fp32's bits, and eight codes
_RAISED = np.uint32((20 << 23) - 8 * _LOWEST % 256)  # to where a number's last bit is the step; 0 is code 0


class Bf16PairQuantizer:
    """Quantises blocks that are whole in their columns.

    Args:
        given: Scratch: 32 bits for two numbers.
        upper: The same.
        lower: The same.
        parity: The same.
    """

    def __init__(self, given: NumpyArray, upper: NumpyArray, lower: NumpyArray, parity: NumpyArray) -> None:
        self._given, self._upper, self._lower, self._parity = given, upper, lower, parity

    def quantise(self, weight: NumpyArray, values: NumpyArray, largest: float, scales: NumpyArray) -> bool:
        """False if a block's numbers are too large or too small for this, or the thread's CPU has no small numbers.

        Args:
            weight: ``[rows, columns]``.
            values: Where their e4m3 numbers go, as bytes.
            largest: The largest e4m3 number.
            scales: Where those of their blocks go.
        """
        if _flushes_to_zero():
            return False
        rows, blocks, half = len(weight), len(scales), weight.size // 2
        given, upper, lower = (
            each[:half].reshape(blocks, -1) for each in (self._given, self._upper, self._lower)
        )
        np.copyto(given.view(np.uint16).reshape(blocks, rows, -1), _by_block(weight.view(np.uint16), blocks))
        np.bitwise_and(given, _PAIR_SIGNLESS, out=lower)
        tops = lower.view(np.uint16).max(1)
        if any(top and top >> 7 not in _EXPONENTS for top in tops.tolist()):
            return False
        numbers = (tops.astype(np.uint32) << 16).view(np.float32)
        np.divide(numbers, np.float32(largest), out=scales)
        scales[tops == 0] = 1.0
        np.bitwise_and(lower, _UPPER, out=upper)
        lower <<= 16
        self._scale(tops, largest, scales, (upper, lower))
        upper >>= 4
        upper &= _UPPER_CODE
        lower >>= 20
        upper |= lower
        np.right_shift(given, 8, out=lower)
        lower &= _SIGNS
        upper |= lower
        codes = upper.view(np.uint16).reshape(blocks, rows, -1)
        np.copyto(_by_block(values, blocks), codes, casting="unsafe")
        return True

    def _scale(
        self, tops: NumpyArray, largest: float, scales: NumpyArray, bits: tuple[NumpyArray, NumpyArray]
    ) -> None:
        """Multiply or divides each block of the numbers ``bits``, and adds what rounds them."""
        factors = np.full(len(tops), _ONE << 23, np.uint32)
        divided = []
        for block, top in enumerate(tops.tolist()):
            factor = _factor(top & _MANTISSA, largest)
            if factor is None:
                divided.append(block)
            elif top:
                factors[block] = factor + ((_ONE - (top >> 7)) << 23)
        for half in bits:
            numbers = half.view(np.float32)
            numbers *= factors.view(np.float32)[:, None]
            for block in divided:
                numbers[block] /= scales[block] * _SCALED
                parity = np.right_shift(half[block], 20, out=self._parity[: half.shape[1]])
                parity &= 1
                half[block] += parity
                half[block] -= 1
            half += _HALF


def _flushes_to_zero() -> bool:
    """Return whether this thread's CPU takes fp32 numbers below 2**-126 for 0; libraries can set that."""
    return not (np.full(4, 2.0**-126, np.float32) * np.float32(0.5)).any()


def _by_block(matrix: NumpyArray, blocks: int) -> NumpyArray:
    """``[blocks, rows, columns of a block]`` of the same memory."""
    return matrix.reshape(len(matrix), blocks, -1).swapaxes(0, 1)


@cache
def _factor(mantissa: int, largest: float) -> int | None:
    """Bits of the factor of blocks whose largest number has ``mantissa``, and exponent 0; None if there is none."""
    top = _ONE << 7 | mantissa
    numbers = (np.arange(top - (_BINADES << 7), top + 1, dtype=np.uint32) << 16).view(np.float32)
    scale = numbers[-1] / np.float32(largest)
    right = codes(numbers / scale)
    for bits in _near(1 / (scale * _SCALED)):
        products = numbers * bits.view(np.float32)
        if np.array_equal((products.view(np.uint32) + _HALF) >> 20, right):
            return int(bits)
    return None


def _near(number: np.float32) -> Iterator[np.uint32]:
    """The bits of ``number``, and of those next to it."""
    for places in _NEAR:
        yield np.uint32(int(number.view(np.uint32)) + places)


def codes(quotients: NumpyArray) -> NumpyArray:
    """The e4m3 numbers nearest to ``quotients``, which are not negative, as bytes: slowly, as one would say it."""
    exponents = np.maximum(np.frexp(quotients)[1] - 1, -6)
    found: NumpyArray = 8 * (exponents + 6) + np.rint(np.ldexp(quotients, 3 - exponents))
    return found.astype(np.uint8)


class Fp8Tile:
    """Scratch for `BLOCK` rows and `WIDTH` columns."""

    def __init__(self) -> None:
        size = BLOCK * WIDTH
        self._wide, self._bits = np.empty(size, np.uint32), np.empty(size, np.uint32)
        self._lowest = np.full(
            size, _LOWEST, np.uint32
        )  # numpy is several times slower with a number instead
        self._codes, self._signs = np.empty(size, np.uint8), np.empty(size, np.uint8)
        self._pairs = Bf16PairQuantizer(*np.split(self._wide, 2), *np.split(self._bits, 2))

    def quantise(self, weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
        """Quantise at most as many rows and columns of one matrix as the tile has.

        Args:
            weight: Them.
            values: Where their e4m3 numbers go, as bytes.
            scales: Where those of their blocks go.
        """
        whole = weight.shape[1] // BLOCK
        halves = weight.dtype == numpy_dtype("BF16") and whole > 0
        cut = whole * BLOCK
        if halves and self._pairs.quantise(weight[:, :cut], values[:, :cut], LARGEST, scales[:whole]):
            weight, values, scales = weight[:, cut:], values[:, cut:], scales[whole:]
        if weight.size:
            self._divide(weight, values, scales)

    def _divide(self, weight: NumpyArray, values: NumpyArray, scales: NumpyArray) -> None:
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
