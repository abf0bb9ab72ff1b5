"""Megatron's ``torch_dist`` checkpoints: PyTorch's distributed checkpoint (DCP) format under Megatron's global names.

    <dir>/metadata.json     {"sharded_backend": "torch_dist", ...}
          common.pt         what every rank has alike (arguments, iteration); not needed, not read
          .metadata       a pickle of torch.distributed.checkpoint.metadata.Metadata:
                            state_dict_metadata  name -> dtype, size and chunks of a tensor, or "bytes"
                            storage_data         (name, offset of a chunk) -> file, first byte, length
          __R_I.distcp    what writer I of rank R wrote, one blob after the other; each blob is an archive
                            of torch.save with one tensor, or one object

Nothing is executed, objects ("bytes") are not even opened, and only the archives' directories are read until a tensor's
elements are asked for.

`storage_forms` lists the names that a parameter may have. Optimizer states (``optimizer.*``, ``chained_N.*``)
and objects (``_extra_state``, random states) are passed over. All names are generated; only the prefix that wrappers
add is found by looking at the embedding's.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import BinaryIO

from mca_config.errors import McaError
from mca_config.files import (
    has_entry,
    naming_read_errors,
    open_regular,
    read_bytes,
    read_json,
    read_text,
    resolve_inside,
)
from mca_config.model_config import FILE_NAME, McaModelConfig
from mca_config.printable import counted
from mca_models.checkpoint.hf_directory import named_config_errors
from mca_models.checkpoint.hf_directory import read_config as read_hf_config
from mca_models.checkpoint.mca_directory import iteration_name, latest_iteration
from mca_models.checkpoint.placement import stored_params
from mca_models.checkpoint.side_files import config_folder
from mca_models.storage.lazy_tensor import Block, Shape, StridedTensor, assemble
from mca_models.storage.source import require_same_names
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.parts.common import EMBEDDING
from mca_models.templates.shapes import full_shape
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
from mca_models.torch_checkpoint.roll import read_config
from mca_models.torch_checkpoint.source import ForeignSource, StoredParam, StoredTensor, with_stored_dtype
from mca_models.torch_checkpoint.storage_forms import Index, StorageForm, storage_forms
from mca_models.torch_checkpoint.torch_file import MAX_PICKLE_BYTES, read_archive, read_pickle
from mca_models.weights import Param

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

    def _read(self) -> Record:
        root = read_pickle(read_bytes(self._file(METADATA), largest=MAX_PICKLE_BYTES), self._where)
        if not isinstance(root, Metadata):
            raise self._damaged(f"a {type(root).__name__} instead of checkpoint metadata")
        return root

    def _file(self, name: str) -> Path:
        return resolve_inside(self._whole, str((self.path / name).relative_to(self._whole)))

    def _blobs(self, root: Record) -> dict[tuple[str, Shape], Blob]:
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

    def _tensor(self, name: str, entry: Record, places: Mapping[tuple[str, Shape], Blob]) -> TensorEntry:
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
        with naming_read_errors(self.path / file):
            return os.fdopen(open_regular(self._file(file)), "rb")

    def _stored(self, stream: BinaryIO, entry: TensorEntry, size: Shape, blob: Blob) -> StridedTensor:
        saved = read_archive(stream, self.path / blob.file, blob.start, blob.length)
        tensor = saved.tensor(saved.tree, entry.name)
        if (tensor.shape, tensor.dtype) != (size, entry.dtype):
            raise McaError(
                f"{tensor.file}, byte {blob.start}: a chunk of {entry.name} is {tensor.dtype} "
                f"{list(tensor.shape)}, {METADATA} says {entry.dtype} {list(size)}; the checkpoint is damaged"
            )
        return tensor


logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
_DIST_MODEL = "dist_model"  # where ROLL's mcore_adapter puts it inside an iteration
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.|chained_\d+\.")


def find_torch_dist(path: Path) -> Path | None:
    """The directory with ``.metadata`` that ``path`` is or leads to; None if there is none."""
    candidates = [path, path / _DIST_MODEL]
    try:
        text = read_text(resolve_inside(path, LATEST)).strip()
        folder = path / (text if text == "release" else iteration_name(latest_iteration(path)))
        candidates += [folder, folder / _DIST_MODEL]
    except McaError:
        pass
    return next((folder for folder in candidates if has_entry(folder, METADATA)), None)


def open_torch_dist(path: Path, config: McaModelConfig | None = None) -> ForeignSource:
    """The checkpoint that ``path`` is or leads to (by ``latest_checkpointed_iteration.txt``), found complete.

    Args:
        path: The checkpoint, one iteration of it, or what ROLL's mcore_adapter wrote.
        config: Of the model; None: from an ``mca_config.json`` or a HF ``config.json`` there or above.

    Raises:
        McaError: Tensors are missing, unexpected, damaged or of another shape.
    """
    folder = find_torch_dist(path)
    if folder is None:
        raise McaError(f"{path}: no {METADATA} is there; expected a torch_dist checkpoint of Megatron")
    _require_backend(folder, path)
    directory = DcpDirectory(folder, path)
    config = config or _config_near(folder)
    if config.mtp_num_layers and not any("mtp.layers." in name for name in directory.tensors):
        logger.warning(
            "%s: the configuration counts %s, but the checkpoint has no such tensors; the model is built without",
            folder,
            counted(config.mtp_num_layers, "MTP layer"),
        )
        config = config.replace_fields(mtp_num_layers=0)
    return _Reader(directory, config).source(path)


def _require_backend(folder: Path, root: Path) -> None:
    file = folder / "metadata.json"
    if not has_entry(folder, file.name):
        return
    backend = read_json(resolve_inside(root, str(file.relative_to(root)))).get("sharded_backend")
    if backend is None:
        raise McaError(f"{file}: names no 'sharded_backend'; expected 'torch_dist' there")
    if backend != "torch_dist":
        raise McaError(
            f"{file}: the checkpoint's format is {backend!r}; expected 'torch_dist', load it with Megatron and "
            "save it with --ckpt-format torch_dist"
        )


def _config_near(folder: Path) -> McaModelConfig:
    place = config_folder(folder)
    if place is None:
        raise McaError(
            f"{folder}: a torch_dist checkpoint does not say what model it holds, and neither {FILE_NAME} nor "
            "config.json is there or above; put the model's Hugging Face config.json next to it"
        )
    if has_entry(place, FILE_NAME):
        return read_config(place)
    with named_config_errors(place):
        return config_from_hf(read_hf_config(place))


class _Reader:
    """Reader of the parameters of a model in a directory."""

    def __init__(self, directory: DcpDirectory, config: McaModelConfig) -> None:
        self.directory, self.config = directory, config
        self.params = get_family(config.model_type).params(config)
        prefix = _prefix(directory)
        self.entries: dict[str, TensorEntry] = {
            name.removeprefix(prefix): entry
            for name, entry in directory.tensors.items()
            if name.startswith(prefix) and not _OPTIMIZER.match(name)
        }

    def source(self, path: Path) -> ForeignSource:
        """All parameters, or one error with everything that is amiss."""
        forms = {param.mca_name(): self._form(param) for param in self.params}
        self._require_complete(forms)
        found = {name: form for name, form in forms.items() if form is not None}
        blocks = self._blocks(found.values())
        tensors = {
            param.mca_name(): self._assembled(param, found[param.mca_name()], blocks)
            for param in self.params
            if param.mca_name() in found
        }
        places = {}
        for param in stored_params(self.params):
            name = param.mca_name()
            places[name] = StoredParam(self._whole(param, tensors[name]), 1, (tensors[name],))
        for param in self.params:
            if param.alias_of is not None and param.mca_name() in tensors:
                first, second = places[param.alias_of].tensors[0], tensors[param.mca_name()]
                places[param.alias_of] = replace(places[param.alias_of], copies=((first, second),))
        return ForeignSource(path, with_stored_dtype(self.config, places), stored_params(self.params), places)

    def _form(self, param: Param) -> StorageForm | None:
        """Return the form in which ``param`` is stored; None if it is not."""
        for form in storage_forms(param, self.config):
            if all(
                key in self.entries and self.entries[key].shape[: len(form.sizes)] == form.sizes
                for key in form.keys
            ):
                return form
        return None

    def _require_complete(self, forms: Mapping[str, StorageForm | None]) -> None:
        used = {key for form in forms.values() if form is not None for key in form.keys}
        absent = {p.mca_name() for p in self.params if p.alias_of is None and forms[p.mca_name()] is None}
        both = "the checkpoint and its configuration"
        require_same_names(self.entries.keys() - absent, used | absent, self.directory.path, both)

    def _blocks(self, forms: Iterable[StorageForm]) -> dict[tuple[str, Index], list[Block]]:
        """The chunks of every entry of every tensor that is used, without the axes of the entries."""
        depths = {key: len(form.index) for form in forms for key in form.keys}
        names = {self.entries[key].name: key for key in depths}
        blocks: dict[tuple[str, Index], list[Block]] = {}
        for name, chunks in self.directory.chunks(names):
            key = names[name]
            for chunk in chunks:
                for index, part in _entries(chunk, depths[key]):
                    blocks.setdefault((key, index), []).append(part)
        return blocks

    def _assembled(
        self, param: Param, form: StorageForm, blocks: Mapping[tuple[str, Index], list[Block]]
    ) -> StoredTensor:
        rows, chunks = 0, []
        depth = len(form.index)
        shapes = [self.entries[key].shape[depth:] for key in form.keys]
        for key, shape in zip(form.keys, shapes, strict=True):
            for chunk in blocks.get((key, form.index), []):
                offsets = (chunk.offsets[0] + rows, *chunk.offsets[1:]) if chunk.offsets else ()
                chunks.append(Block(offsets, chunk.tensor))
            rows += shape[0] if shape else 0
        whole = (rows, *shapes[0][1:]) if shapes[0] else ()
        dtype = self.entries[form.keys[0]].dtype
        return assemble(param.mca_name(), dtype, whole, chunks, str(self.directory.path))

    def _whole(self, param: Param, tensor: StoredTensor) -> Shape:
        expected = full_shape(param, self.config)
        enough = tensor.shape[0] >= expected[0] if param.vocab else tensor.shape == expected
        if not enough or tensor.shape[1:] != expected[1:]:
            raise McaError(
                f"{self.directory.path}: {param.mca_name()} has shape {list(tensor.shape)}; the configuration "
                f"says {list(expected)}"
            )
        return expected


def _prefix(directory: DcpDirectory) -> str:
    """Return the prefix of all names of the model, such as ``module.``."""
    found = [
        name.removesuffix(EMBEDDING)
        for name in directory.tensors
        if name.endswith(EMBEDDING) and not _OPTIMIZER.match(name)
    ]
    if len(found) != 1:
        where = directory.path / METADATA
        raise McaError(f"{where}: {len(found)} tensors are named {EMBEDDING}; expected the one of a GPTModel")
    return found[0]


def _entries(chunk: Block, depth: int) -> Iterator[tuple[Index, Block]]:
    """The entries of the first ``depth`` axes that ``chunk`` holds, without these axes."""
    first = zip(chunk.offsets[:depth], chunk.tensor.shape[:depth], strict=True)
    for index in product(*(range(start, start + size) for start, size in first)):
        tensor = chunk.tensor
        for at, start in zip(index, chunk.offsets, strict=False):
            tensor = tensor.entry(at - start)
        yield index, Block(chunk.offsets[depth:], tensor)
