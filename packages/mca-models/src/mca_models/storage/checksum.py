"""CRC-32 of parts joined into the CRC-32 of the whole, so that several threads can sum up one file.

A CRC is linear over GF(2): crc(A + B) = crc(A) * x^(8 len(B)) xor crc(B), as polynomials modulo the CRC's
own. Bits are reflected, as in zlib: the highest bit is the coefficient of x^0.
"""

import os
import zlib
from functools import lru_cache
from pathlib import Path

from mca_config.files import naming_read_errors

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_CHUNK = 8 << 20


def _times(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial, by repeated squaring."""
    power, square = _ONE, 1 << 23  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        nbytes >>= 1
    return power


@lru_cache(maxsize=64)
def _shifted_bytes(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """For each of the four bytes of a checksum what it becomes, times x^(8 nbytes)."""
    bits = [_times(_shift(nbytes), 1 << bit) for bit in range(32)]
    tables = []
    for low in range(0, 32, 8):
        table = [0]
        for bit in bits[low : low + 8]:
            table += [entry ^ bit for entry in table]
        tables.append(tuple(table))
    return tuple(tables)


def crc32_join(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two parts one after the other, from theirs and the length of the second."""
    a, b, c, d = _shifted_bytes(second_nbytes)
    shifted = a[first & 255] ^ b[first >> 8 & 255] ^ c[first >> 16 & 255] ^ d[first >> 24]
    return shifted ^ second


def file_crc32(file: Path) -> int:
    """The CRC-32 of all of ``file``, read through a bounded buffer."""
    buffer, crc = bytearray(_CHUNK), 0
    view = memoryview(buffer)
    with naming_read_errors(file), file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := stream.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc
