"""Files of ``torch.save`` (``.pt``, ``.bin``, ``.pth``), read without torch and without loading.

Since torch 1.6 such a file is a zip archive of uncompressed members under one folder:

    <folder>/data.pkl      a pickle; a tensor in it is (storage, offset, shape, strides), a storage a key
    <folder>/data/<key>    the bytes of one storage; several tensors may be views of it
    <folder>/byteorder     "little" or "big"
    <folder>/version, .format_version, .storage_alignment, .data/serialization_id

The pickle is read by ``pickle_reader``, which executes nothing. A tensor that is a small view of a large
storage costs what the view holds, not what the file stores. What older versions wrote is read by `legacy_file`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mca_config.errors import McaError
from mca_config.files import open_regular
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.lazy_tensor import StridedTensor
from mca_models.torch_checkpoint.allowed_globals import Dtype, Pickled, StorageRef, TensorRef
from mca_models.torch_checkpoint.legacy_file import is_legacy, read_legacy
from mca_models.torch_checkpoint.pickle_reader import read_pickle
from mca_models.torch_checkpoint.zip_regions import Member, ZipFault, data_offset, read_directory, starts_zip

MAX_PICKLE_BYTES = 1 << 30
EXTRA_STATE = "_extra_state"


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
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            if is_legacy(stream.read(4)):
                return TorchFile(file, *read_legacy(stream, file))
            return read_archive(stream, file)
    except OSError as error:
        raise McaError(f"{file}: cannot be read ({error.strerror})") from None


def read_archive(stream: BinaryIO, file: Path, start: int = 0, length: int | None = None) -> TorchFile:
    """The archive in ``length`` bytes from ``start`` on of ``file``, which is open as ``stream``."""
    where = f"{file}, byte {start}" if start else str(file)
    size = stream.seek(0, 2)
    length = size - start if length is None else length
    if start < 0 or length < 0 or start + length > size:
        raise McaError(
            f"{where}: {length} bytes are expected there, the file ends at {size}; it is truncated"
        )
    stream.seek(start)
    _require_zip(stream.read(4), where)
    try:
        members = read_directory(stream, start, length)
        folder = _folder(members)
        order = members.get(f"{folder}byteorder")
        if order is not None and _content(stream, start, order) != b"little":
            raise McaError(f"{where}: the numbers are stored big-endian; save it again on a common machine")
        tree = read_pickle(_content(stream, start, members[f"{folder}data.pkl"]), where)
        prefix = f"{folder}data/"
        storages = {
            name.removeprefix(prefix): (start + data_offset(stream, start, member), member.nbytes)
            for name, member in members.items()
            if name.startswith(prefix)
        }
        if any(offset + nbytes > start + length for offset, nbytes in storages.values()):
            raise ZipFault("a storage reaches beyond its end; the file is truncated")
    except ZipFault as fault:
        raise McaError(f"{where}: not a file of torch.save: {fault}") from None
    return TorchFile(file, tree, storages)


def _require_zip(first: bytes, where: str) -> None:
    if starts_zip(first):
        return
    raise McaError(f"{where}: not a file of torch.save (it begins with {first!r})")


def _folder(members: dict[str, Member]) -> str:
    """The folder of all members, with its slash."""
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ZipFault("it has no data.pkl")
    return pickles[0].removesuffix("data.pkl")


def _content(stream: BinaryIO, start: int, member: Member) -> bytes:
    if member.nbytes > MAX_PICKLE_BYTES:
        raise ZipFault(f"a pickle of {member.nbytes} bytes")
    stream.seek(start + data_offset(stream, start, member))
    return stream.read(member.nbytes)
