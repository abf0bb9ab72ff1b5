"""Read a checkpoint of `writer` on any layout, without executing anything in it.

The index of such a folder, ``.metadata``, is a pickle, and may name entries that are pickles too; torch would execute
them. Here `mca_models.torch_checkpoint.torch_dist` reads the index, and torch gets an index with its tensors only.
"""

from pathlib import Path

import torch

from mca_config.errors import McaError
from mca_config.types import Values
from mca_models.megatron import platform
from mca_models.megatron.tensors import DTYPE_OF
from mca_models.megatron.types import DcpObject, Settings
from mca_models.torch_checkpoint.torch_dist import METADATA, DcpDirectory, TensorEntry


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the tensors in ``folder`` by global name.

    Raises:
        McaError: Its index is missing, damaged, or not what PyTorch writes.
    """
    return {name: entry.shape for name, entry in DcpDirectory(folder).tensors.items()}


def read_state(state: Values, folder: Path) -> Settings:
    """Read the tensors of ``state``; collective.

    Args:
        state: Sharded tensors, or factories of them; any names.
        folder: Written by `write_state`; every rank sees it.

    Returns:
        This rank's shards by the names of ``state``.

    Raises:
        McaError: The index is damaged, or a tensor has another shape there.
    """
    from megatron.core.dist_checkpointing import mapping, state_dict_utils
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    index = _index(DcpDirectory(folder))
    sharded, _, factories = state_dict_utils.load_preprocess(dict(state))
    with platform.replaced(strategies, "_get_filesystem_reader", lambda *_, **__: _reader(folder, index)):
        try:
            loaded = strategies.TorchDistLoadShardedStrategy().load(sharded, folder)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise McaError(f"{folder}: cannot be read ({reason})") from error
    merged: Settings = mapping.apply_factory_merges(loaded, factories)
    return merged


def _reader(folder: Path, index: DcpObject) -> DcpObject:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(str(folder))
    reader.read_metadata = lambda *_, **__: index  # type: ignore[method-assign]
    return reader


def _index(directory: DcpDirectory) -> DcpObject:
    """Convert the index to torch's ``Metadata``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    tensors = directory.tensors
    storage = {
        MetadataIndex(name, torch.Size(offset)): _StorageInfo(blob.file, blob.start, blob.length)
        for name, entry in tensors.items()
        for offset, (_, blob) in entry.blobs.items()
    }
    index_file = directory.path / METADATA
    return Metadata({name: _tensor(entry, index_file) for name, entry in tensors.items()}, None, storage)


def _tensor(entry: TensorEntry, where: Path) -> DcpObject:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    if entry.dtype not in DTYPE_OF:
        raise McaError(f"{where}: {entry.name} is {entry.dtype}; expected one of {', '.join(DTYPE_OF)}")
    chunks = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        for offset, (size, _) in entry.blobs.items()
    ]
    properties = TensorProperties(dtype=DTYPE_OF[entry.dtype])
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
