"""Files of ``torch.save`` (``.pt``, ``.bin``, ``.pth``), read without torch and without loading.

Since torch 1.6 such a file is a zip archive of uncompressed members under one folder:

    <folder>/data.pkl      a pickle; a tensor in it is (storage, offset, shape, strides), a storage a key
    <folder>/data/<key>    the bytes of one storage; several tensors may be views of it
    <folder>/byteorder     "little" or "big"
    <folder>/version, .format_version, .storage_alignment, .data/serialization_id

The pickle is read by ``read_pickle``, which executes nothing. Weights of a Hugging Face directory may be in such
files: ``pytorch_model.bin``, alone or in indexed shards. A tensor that is a small view of a large
storage costs what the view holds, not what the file stores.
"""

import errno
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mca_config.errors import McaError
from mca_config.files import COPY_AGAIN, has_entry, naming_read_errors, open_regular, resolve_inside
from mca_models.checkpoint.hf_directory import PICKLED, PICKLED_INDEX, indexed_tensors
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.lazy_tensor import StridedTensor
from mca_models.torch_checkpoint.allowed_globals import (
    GLOBALS,
    Dtype,
    Pickled,
    StorageRef,
    TensorRef,
    persistent,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

from collections.abc import Sequence

from mca_models.storage.safetensors import TensorInfo


class _Refused(Exception):
    """A global that is not in the table."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Pickled:
        """The stand-in for a global; nothing is imported."""
        try:
            return GLOBALS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Pickled) -> Pickled:
        """The storage that a persistent id names."""
        return persistent(pid)


def read_pickle(data: bytes, where: str) -> Pickled:
    """Read the pickle ``data`` into plain values and stand-ins; ``where`` names it in errors.

    Raises:
        McaError: It names a global that has no stand-in, or is damaged.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except _Refused as refused:
        raise McaError(
            f"{where}: the pickle names {refused}, which a checkpoint of weights does not need; nothing was "
            "executed. Save the weights alone and try again, or do not trust the file"
        ) from None
    except Exception as error:  # the interpreter raises nearly any kind on bytes that are no pickle
        raise McaError(f"{where}: not a pickle that can be read ({error}); the file is damaged") from None


MAX_PICKLE_BYTES = 1 << 30
EXTRA_STATE = "_extra_state"
_ZIP, _BEFORE_1_6 = b"PK\x03\x04", b"\x80\x02\x8a\n"
"""First bytes of files."""
_LOCAL = struct.Struct("<4s5H3L2H")  # header of a member, right before its name and its data


@dataclass(frozen=True)
class TorchFile:
    """Archive of ``torch.save``.

    Args:
        file: Path of the archive.
        tree: What was saved, in plain values and stand-ins; tensors are ``TensorRef``.
        storages: First byte in ``file`` and length of each storage.
    """

    file: Path
    tree: Pickled
    storages: Mapping[str, tuple[int, int]]

    def tensor(self, ref: Pickled, name: str) -> StridedTensor:
        """Return the tensor of ``ref``, a leaf of the tree, checked against its storage."""
        where = f"{self.file}: tensor {name!r}"
        if not isinstance(ref, TensorRef) or not isinstance(ref.storage, StorageRef):
            raise McaError(f"{where} is no tensor but {type(ref).__name__}")
        untyped = ref.storage.dtype is None
        dtype = ref.dtype if untyped else ref.storage.dtype
        if not isinstance(dtype, Dtype) or dtype.code not in ITEM_SIZES:
            raise McaError(f"{where} has elements of {dtype}, which no safetensors file can hold")
        if not _is_view(ref):
            raise McaError(
                f"{where} has the shape {ref.shape} and strides {ref.strides}; the file is damaged"
            )
        itemsize = ITEM_SIZES[dtype.code]
        start, stored = self.storages.get(ref.storage.key, (0, -1))
        if stored != ref.storage.numel * (1 if untyped else itemsize):
            raise McaError(f"{where}: its storage {ref.storage.key!r} is missing or cut; the file is damaged")
        end = ref.offset + 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.strides, strict=True))
        if 0 not in ref.shape and end * itemsize > stored:
            raise McaError(f"{where} reaches beyond its storage of {stored} bytes; the file is damaged")
        return StridedTensor(
            name, dtype.code, ref.shape, ref.strides, start + ref.offset * itemsize, self.file
        )

    def state_dict(self, *keys: str) -> dict[str, StridedTensor]:
        """The tensors in the dict at ``keys`` of the tree; ``_extra_state`` entries are passed over.

        ``_extra_state`` is what Transformer Engine keeps for fp8 training (scales that it finds again);
        it holds no weight.
        """
        tree = self.tree
        for key in keys:
            if not isinstance(tree, dict) or key not in tree:
                raise McaError(f"{self.file}: has no {key!r}; expected a checkpoint with {'.'.join(keys)!r}")
            tree = tree[key]
        if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
            raise McaError(f"{self.file}: expected a dict of tensors by name")
        return {
            name: self.tensor(value, name) for name, value in tree.items() if not name.endswith(EXTRA_STATE)
        }


def _is_view(ref: TensorRef) -> bool:
    """Return whether all counts in ``ref`` are such."""
    if not isinstance(ref.shape, tuple) or not isinstance(ref.strides, tuple):
        return False
    counts = (ref.offset, ref.storage.numel, *ref.shape, *ref.strides)
    return len(ref.shape) == len(ref.strides) and all(type(n) is int and n >= 0 for n in counts)


def open_torch_file(file: Path) -> TorchFile:
    """The archive in ``file``.

    Raises:
        McaError: The file is missing, damaged, or its pickle is refused.
    """
    with naming_read_errors(file), os.fdopen(open_regular(file), "rb") as stream:
        return read_archive(stream, file)


def read_archive(stream: BinaryIO, file: Path, start: int = 0, length: int | None = None) -> TorchFile:
    """The archive in ``length`` bytes from ``start`` on of ``file``, which is open as ``stream``."""
    where = f"{file}, byte {start}" if start else str(file)
    size = stream.seek(0, 2)
    length = size - start if length is None else length
    if start < 0 or length < 0 or start + length > size:
        raise McaError(
            f"{where}: {length} bytes are expected there, the file ends at {size}; it is truncated, {COPY_AGAIN}"
        )
    stream.seek(start)
    _require_zip(stream.read(4), where)
    try:
        members = _members(_Section(stream, start, length))
        folder = _folder(members)
        order = members.get(f"{folder}byteorder")
        if order is not None and _content(stream, start, order) != b"little":
            raise McaError(f"{where}: the numbers are stored big-endian; save it again on a common machine")
        tree = read_pickle(_content(stream, start, members[f"{folder}data.pkl"]), where)
        prefix = f"{folder}data/"
        storages = {
            name.removeprefix(prefix): (_data_start(stream, start, member), member.file_size)
            for name, member in members.items()
            if name.startswith(prefix)
        }
        if any(offset + nbytes > start + length for offset, nbytes in storages.values()):
            raise zipfile.BadZipFile("a storage reaches beyond its end; the file is truncated")
    except McaError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error) as fault:
        raise McaError(f"{where}: not a file of torch.save: {fault}") from None
    return TorchFile(file, tree, storages)


class _Section(io.RawIOBase):
    """A range of bytes of an open file, as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = (0, self._at, self._length)[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._start + self._at)
        data = self._stream.read(max(0, min(len(view), self._length - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _members(section: _Section) -> dict[str, zipfile.ZipInfo]:
    """Return the members of the archive by name; all are stored without compression."""
    try:
        with zipfile.ZipFile(section) as archive:
            infos = archive.infolist()
    except zipfile.BadZipFile as error:
        raise zipfile.BadZipFile(f"{error}; the file is truncated or damaged") from None
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise zipfile.BadZipFile("two members have one name; the file is damaged")
    for name, info in members.items():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise zipfile.BadZipFile(
                f"its member {name!r} is compressed; torch.save stores without compression"
            )
    return members


def _require_zip(first: bytes, where: str) -> None:
    if first == _ZIP:
        return
    if first == _BEFORE_1_6:
        raise McaError(
            f"{where}: torch before version 1.6 wrote it; read it with torch.load and write it again with torch.save, "
            "or use the model's safetensors"
        )
    raise McaError(f"{where}: not a file of torch.save (it begins with {first!r})")


def _folder(members: Mapping[str, zipfile.ZipInfo]) -> str:
    """The folder of all members, with its slash."""
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise zipfile.BadZipFile("it has no data.pkl")
    return pickles[0].removesuffix("data.pkl")


def _data_start(stream: BinaryIO, start: int, member: zipfile.ZipInfo) -> int:
    """Return the first byte of the data of ``member`` of the archive at ``start``."""
    stream.seek(start + member.header_offset)
    magic, *_, name, extra = _LOCAL.unpack(stream.read(_LOCAL.size))
    if magic != _ZIP:
        raise zipfile.BadZipFile("a member without its local header; the file is damaged")
    return start + member.header_offset + _LOCAL.size + int(name) + int(extra)


def _content(stream: BinaryIO, start: int, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > MAX_PICKLE_BYTES:
        raise zipfile.BadZipFile(f"a pickle of {member.file_size} bytes")
    stream.seek(_data_start(stream, start, member))
    return stream.read(member.file_size)


def pickled_tensors(path: Path) -> Sequence[TensorInfo | StridedTensor]:
    """The tensors in ``pytorch_model.bin`` of directory ``path``, or in the shards that its index names.

    Raises:
        McaError: A file is missing or damaged, or its pickle names what a checkpoint of weights does not need.
    """
    if has_entry(path, PICKLED):
        return list(read_tensors(resolve_inside(path, PICKLED)).values())
    return indexed_tensors(path, PICKLED_INDEX, read_tensors)


def read_tensors(file: Path) -> dict[str, TensorInfo | StridedTensor]:
    """The tensors in one file, by name; those that lie in one run of bytes as if it were safetensors."""
    return {name: tensor.info() or tensor for name, tensor in open_torch_file(file).state_dict().items()}
