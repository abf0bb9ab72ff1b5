"""PyTorch's distributed checkpoint (DCP) format, read without torch.

    <dir>/.metadata          a pickle of torch.distributed.checkpoint.metadata.Metadata:
                               state_dict_metadata  name -> dtype, size and chunks of a tensor, or "bytes"
                               storage_data         (name, offset of a chunk) -> file, first byte, length
    <dir>/__R_I.distcp       what writer I of rank R wrote, one blob after the other; each blob is an archive
                               of torch.save with one tensor, or one object

Nothing is executed, objects ("bytes") are not even opened, and only the archives' directories are read
until a tensor's elements are asked for.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mca_config.errors import McaError
from mca_config.files import open_regular, read_bytes, resolve_inside
from mca_models.storage.lazy_tensor import Block, Shape, StridedTensor
from mca_models.torch_checkpoint.allowed_globals import (
    ChunkStorageMetadata,
    Dtype,
    Metadata,
    MetadataIndex,
    Pickled,
    Record,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from mca_models.torch_checkpoint.torch_file import MAX_PICKLE_BYTES, read_archive, read_pickle

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Blob:
    """Position of one chunk in a file."""

    file: str
    """Name inside the directory."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the checkpoint."""

    name: str
    dtype: str
    """Safetensors code."""
    shape: Shape
    blobs: Mapping[Shape, tuple[Shape, Blob]]
    """Size and place of every chunk, by its offset."""


class DcpDirectory:
    """An opened directory.

    Args:
        path: With the ``.metadata`` file in it.
        whole: The checkpoint that it is a part of, which no link may lead out of; None: ``path``.

    Raises:
        McaError: ``.metadata`` is missing, damaged, or not what PyTorch writes.
    """

    def __init__(self, path: Path, whole: Path | None = None) -> None:
        self.path, self._whole = path, whole or path
        self._where = str(path / METADATA)
        root = self._read()
        places = self._blobs(root)
        entries = self._field(root, "state_dict_metadata", dict)
        self.tensors: dict[str, TensorEntry] = {}
        """All tensors by name; objects are left out."""
        for name, entry in entries.items():
            if isinstance(name, str) and isinstance(entry, TensorStorageMetadata):
                self.tensors[name] = self._tensor(name, entry, places)

    def _read(self) -> Metadata:
        root = read_pickle(read_bytes(self._file(METADATA), largest=MAX_PICKLE_BYTES), self._where)
        if not isinstance(root, Metadata):
            raise self._damaged(f"a {type(root).__name__} instead of checkpoint metadata")
        return root

    def _file(self, name: str) -> Path:
        return resolve_inside(self._whole, str((self.path / name).relative_to(self._whole)))

    def _blobs(self, root: Metadata) -> dict[tuple[str, Shape], Blob]:
        places: dict[tuple[str, Shape], Blob] = {}
        for index, info in self._field(root, "storage_data", dict).items():
            if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
                raise self._damaged("a storage that is none")
            offset = index.state.get("offset") if isinstance(index.state, dict) else None
            if offset is None:
                continue  # an object
            name = self._field(index, "fqn", str)
            if isinstance(info.state, dict) and info.state.get("transform_descriptors"):
                raise McaError(f"{self._where}: {name} is compressed or encrypted, which is not supported")
            file = self._field(info, "relative_path", str)
            if Path(file).name != file or file in ("", ".", ".."):
                raise self._damaged(f"{name} is stored in {file!r}, outside of the directory")
            start, length = self._field(info, "offset", int), self._field(info, "length", int)
            places[name, self._shape(offset)] = Blob(file, start, length)
        return places

    def _tensor(
        self, name: str, entry: TensorStorageMetadata, places: Mapping[tuple[str, Shape], Blob]
    ) -> TensorEntry:
        properties = self._field(entry, "properties", TensorProperties).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if isinstance(properties, dict):
            dtype = properties.get("dtype")
        if not isinstance(dtype, Dtype):
            raise self._damaged(f"{name} has no dtype")
        blobs: dict[Shape, tuple[Shape, Blob]] = {}
        for chunk in self._field(entry, "chunks", list):
            if not isinstance(chunk, ChunkStorageMetadata):
                raise self._damaged(f"{name} has a chunk that is none")
            offset = self._shape(self._field(chunk, "offsets", tuple))
            if (name, offset) not in places:
                raise McaError(f"{self._where}: chunk {list(offset)} of {name} is stored nowhere")
            blobs[offset] = (self._shape(self._field(chunk, "sizes", tuple)), places[name, offset])
        return TensorEntry(name, dtype.code, self._shape(self._field(entry, "size", tuple)), blobs)

    def _field(self, record: Record, name: str, kind: type) -> Pickled:
        value = record.state.get(name) if isinstance(record.state, dict) else None
        if not isinstance(value, kind):
            raise self._damaged(f"a {type(record).__name__} without {name}")
        return value

    def _shape(self, value: Pickled) -> Shape:
        if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
            raise self._damaged(f"the shape or offset {value!r}")
        return value

    def _damaged(self, what: str) -> McaError:
        return McaError(f"{self._where}: {what}; the file is damaged or of another format")

    def chunks(self, names: Iterable[str]) -> Iterator[tuple[str, list[Block]]]:
        """The chunks of each of the tensors ``names``, every one found in its file and checked."""
        with ExitStack() as stack:
            streams: dict[str, BinaryIO] = {}
            for name in names:
                entry = self.tensors[name]
                found = []
                for offset, (size, blob) in entry.blobs.items():
                    if blob.file not in streams:
                        streams[blob.file] = stack.enter_context(self._open(blob.file))
                    tensor = self._stored(streams[blob.file], entry, size, blob)
                    found.append(Block(offset, tensor))
                yield name, found

    def _open(self, file: str) -> BinaryIO:
        try:
            return os.fdopen(open_regular(self._file(file)), "rb")
        except OSError as error:
            raise McaError(f"{self.path / file}: cannot be read ({error.strerror})") from None

    def _stored(self, stream: BinaryIO, entry: TensorEntry, size: Shape, blob: Blob) -> StridedTensor:
        saved = read_archive(stream, self.path / blob.file, blob.start, blob.length)
        tensor = saved.tensor(saved.tree, entry.name)
        if (tensor.shape, tensor.dtype) != (size, entry.dtype):
            raise McaError(
                f"{tensor.file}, byte {blob.start}: a chunk of {entry.name} is {tensor.dtype} "
                f"{list(tensor.shape)}, {METADATA} says {entry.dtype} {list(size)}; the checkpoint is damaged"
            )
        return tensor
