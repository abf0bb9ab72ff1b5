"""Members of an uncompressed zip archive: their positions, without reading them.

The archive may be a part of a file. ``torch.save`` stores its members uncompressed, so each is a plain
range of bytes: the central directory at the end gives its size and the place of its local header, and
the local header gives the length of the fields before the data.
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

_END = struct.Struct("<4s4H2LH")  # of the central directory
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s4B4H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_NO_32, _NO_16 = 0xFFFFFFFF, 0xFFFF
_TAIL = 4096
_LONGEST_TAIL = _END.size + 0xFFFF + _LOCATOR64.size


class ZipFault(ValueError):
    """The bytes are no archive that can be read this way."""


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file."""

    header: int
    """Offset of its local header from the start of the archive."""
    nbytes: int


def starts_zip(first: bytes) -> bool:
    """Return whether a file that begins with ``first`` may be a zip archive."""
    return first.startswith(b"PK\x03\x04")


def read_directory(stream: BinaryIO, start: int, length: int) -> dict[str, Member]:
    """The members of the archive at bytes ``start`` to ``start + length`` of ``stream``."""
    for size in (_TAIL, _LONGEST_TAIL):
        size = min(size, length)
        tail = _read(stream, start + length - size, size)
        at = tail.rfind(b"PK\x05\x06")
        if at >= 0 or size == length:
            break
    if at < 0 or at + _END.size > len(tail):
        raise ZipFault("no end of a zip archive; the file is truncated or not one")
    _, disk, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    if disk not in (0, _NO_16):
        raise ZipFault("an archive in several files")
    locator = at - _LOCATOR64.size
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        count, nbytes, offset = _end64(stream, start, length, _LOCATOR64.unpack_from(tail, locator)[2])
    if offset + nbytes > length:
        raise ZipFault("its directory is outside of it; the file is truncated")
    return _entries(_read(stream, start + offset, nbytes), count, offset)


def data_offset(stream: BinaryIO, start: int, member: Member) -> int:
    """First byte of the data of ``member``, counted from the start of the archive at ``start``."""
    magic, *_, name, extra = _LOCAL.unpack(_read(stream, start + member.header, _LOCAL.size))
    if magic != b"PK\x03\x04":
        raise ZipFault("a member without its local header; the file is damaged")
    return member.header + _LOCAL.size + int(name) + int(extra)


def _end64(stream: BinaryIO, start: int, length: int, at: int) -> tuple[int, int, int]:
    if at + _END64.size > length:
        raise ZipFault("its directory is outside of it; the file is truncated")
    magic, *_, count, nbytes, offset = _END64.unpack(_read(stream, start + at, _END64.size))
    if magic != b"PK\x06\x06":
        raise ZipFault("a damaged end of its directory")
    return count, nbytes, offset


def _entries(directory: bytes, count: int, limit: int) -> dict[str, Member]:
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise ZipFault("a directory shorter than it says; the file is damaged")
        fields = _ENTRY.unpack_from(directory, at)
        magic, method, packed, size, header = fields[0], fields[6], fields[10], fields[11], fields[-1]
        name_length, extra_length, comment_length = fields[12:15]
        name_at = at + _ENTRY.size
        name = directory[name_at : name_at + name_length].decode("utf-8", "replace")
        extra = directory[name_at + name_length : name_at + name_length + extra_length]
        size, packed, header = _wide(extra, size, packed, header)
        if magic != b"PK\x01\x02" or name in members:
            raise ZipFault(f"a damaged directory at {name!r}")
        if method != 0 or size != packed:
            raise ZipFault(f"its member {name!r} is compressed; torch.save stores without compression")
        if header + _LOCAL.size + size > limit:
            raise ZipFault(f"its member {name!r} is outside of it; the file is truncated")
        members[name] = Member(header, size)
        at = name_at + name_length + extra_length + comment_length
    return members


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """``values`` with those that did not fit in 32 bits taken from the zip64 field of ``extra``."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            return tuple(next(wide, value) if value == _NO_32 else value for value in values)
        at += 4 + size
    return values


def _read(stream: BinaryIO, at: int, size: int) -> bytes:
    stream.seek(at)
    data = stream.read(size)
    if len(data) != size:
        raise ZipFault("ended too early; the file is truncated")
    return data
