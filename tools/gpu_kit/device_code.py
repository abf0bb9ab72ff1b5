"""Device code in a shared library: nvcc puts that of every architecture in, of which a machine needs one.

A section ``.nv_fatbin`` holds containers (magic 0xBA55ED50, a header with the bytes that follow) of entries: kind (1:
ptx, 2: elf), the bytes of its own header, the bytes of its payload, the architecture as a number such as 90. Payloads
of others are overwritten with zeros, where they lie, so that no address changes; compressed they then take nothing.
"""

import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0xBA55ED50
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


@dataclass(frozen=True)
class Entry:
    """A piece of device code.

    Args:
        architecture: Such as 90.
        start: Its first byte in the file.
        stop: After its last.
    """

    architecture: int
    start: int
    stop: int


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """Every piece of device code of an ELF file."""
    for start, size in _sections(data):
        at = start
        while at < start + size:
            if struct.unpack_from("<I", data, at)[0] != _MAGIC:
                at += 8  # containers are padded to that
                continue
            header, length = struct.unpack_from("<HQ", data, at + 6)
            stop = at + header + length
            yield from _of_container(data, at + header, stop)
            at = stop


def _of_container(data: bytes | bytearray, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        header, size = struct.unpack_from("<IQ", data, at + 4)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(architecture, at + header, at + header + size)
        at += header + size


def _sections(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """First byte and size of the sections with device code."""
    (table,) = struct.unpack_from("<Q", data, 40)
    width, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * width) for number in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, size in headers:
        if data[text + name : data.index(0, text + name)] in _SECTIONS:
            yield offset, size


def keep_only(library: Path, architectures: Container[int]) -> int:
    """Overwrites the device code of other ``architectures``; how many bytes."""
    data, zeroed = bytearray(library.read_bytes()), 0
    for entry in entries(data):
        if entry.architecture not in architectures:
            data[entry.start : entry.stop] = bytes(entry.stop - entry.start)
            zeroed += entry.stop - entry.start
    library.write_bytes(data)
    return zeroed
