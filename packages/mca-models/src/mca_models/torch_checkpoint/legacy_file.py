"""Files of ``torch.save`` before version 1.6: pickles one after another, then the bytes of each storage.

    magic number, protocol 1001, facts about the machine, what was saved, keys of the storages     five pickles
    for each key: the number of its elements (8 bytes), the elements

The pickles are read by ``pickle_reader``, which executes nothing, and never further than ``MAX_PICKLE_BYTES``.
"""

import struct
from pathlib import Path
from typing import BinaryIO

from mca_config.errors import McaError
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.torch_checkpoint.allowed_globals import Pickled, StorageRef
from mca_models.torch_checkpoint.pickle_reader import read_pickled

MAX_PICKLE_BYTES = 1 << 30
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_COUNT = struct.Struct("<q")


class _Bounded:
    """The stream of a file that gives no more than so many bytes, as the interpreter of pickles asks for them."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._left = stream, limit

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        return self._consume(self._stream.read(self._left if count < 0 else min(count, self._left)))

    def readline(self) -> bytes:
        """The next line."""
        return self._consume(self._stream.readline(self._left))

    def _consume(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data


def is_legacy(first: bytes) -> bool:
    """Return whether a file that begins with ``first`` may be one: a pickle of a number of ten bytes."""
    return first.startswith(b"\x80\x02\x8a\n")


def read_legacy(stream: BinaryIO, file: Path) -> tuple[Pickled, dict[str, tuple[int, int]]]:
    """Read the saved object, and first byte and length of each storage.

    Args:
        stream: The open file.
        file: Its name, for errors.

    Raises:
        McaError: It is damaged, or its pickle is refused.
    """
    size = stream.seek(0, 2)
    stream.seek(0)
    bounded, where = _Bounded(stream, min(size, MAX_PICKLE_BYTES)), str(file)
    magic, protocol, machine = (read_pickled(bounded, where)[0] for _ in range(3))
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise McaError(f"{file}: not a file of torch.save, or of an unknown version; it is damaged")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise McaError(f"{file}: the numbers are stored big-endian; save it again on a common machine")
    tree, used = read_pickled(bounded, where)
    keys, _ = read_pickled(bounded, where)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise McaError(f"{file}: has no list of its storages; the file is damaged")
    return tree, _storages(stream, size, keys, used, file)


def _storages(
    stream: BinaryIO, size: int, keys: list[str], used: dict[str, StorageRef], file: Path
) -> dict[str, tuple[int, int]]:
    """Return the positions of the storages, which follow one another from here on."""
    found: dict[str, tuple[int, int]] = {}
    for key in keys:
        head = stream.read(_COUNT.size)
        dtype = used[key].dtype if key in used else None
        if len(head) < _COUNT.size or dtype is None or dtype.code not in ITEM_SIZES:
            raise McaError(f"{file}: storage {key!r} is missing or of no known type; the file is damaged")
        count, start = _COUNT.unpack(head)[0], stream.tell()
        nbytes = count * ITEM_SIZES[dtype.code]
        if count < 0 or start + nbytes > size:
            raise McaError(f"{file}: storage {key!r} reaches beyond the end; the file is truncated")
        found[key] = (start, nbytes)
        stream.seek(start + nbytes)
    return found
