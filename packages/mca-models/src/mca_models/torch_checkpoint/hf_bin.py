"""Weights of a Hugging Face directory in files of ``torch.save``: ``pytorch_model.bin``, alone or in indexed shards.

No pickle is executed. Where there are safetensors too, those are read instead.
"""

from collections.abc import Sequence
from pathlib import Path

from mca_config.errors import McaError, with_location
from mca_config.files import has_entry, read_json, resolve_inside
from mca_models.storage.lazy_tensor import StridedTensor
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import require_same_names
from mca_models.torch_checkpoint.torch_file import open_torch_file

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SAFE = ("model.safetensors", "model.safetensors.index.json")


def pickled_tensors(path: Path) -> Sequence[TensorInfo | StridedTensor] | None:
    """The tensors in the ``.bin`` files of directory ``path``; None: it has safetensors, or neither.

    Raises:
        McaError: A file is missing or damaged, or its pickle names what a checkpoint of weights does not need.
    """
    if any(has_entry(path, name) for name in _SAFE):
        return None
    if has_entry(path, SINGLE):
        return list(read_tensors(resolve_inside(path, SINGLE)).values())
    return _indexed(path) if has_entry(path, INDEX) else None


def read_tensors(file: Path) -> dict[str, TensorInfo | StridedTensor]:
    """The tensors in one file, by name; those that lie in one run of bytes as if it were safetensors."""
    return {name: tensor.info() or tensor for name, tensor in open_torch_file(file).state_dict().items()}


def _indexed(path: Path) -> Sequence[TensorInfo | StridedTensor]:
    weight_map = read_json(resolve_inside(path, INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise McaError(f"{path / INDEX}: has no 'weight_map' from tensor to file names; fetch the file again")
    found: dict[str, TensorInfo | StridedTensor] = {}
    for name in sorted(set(weight_map.values())):
        try:
            file = resolve_inside(path, name)
        except McaError as error:
            raise with_location(error, path / INDEX) from None
        tensors = read_tensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise McaError(f"{path}: tensor {twice[0]} is in {found[twice[0]].file.name} and in {name}")
        found |= tensors
    require_same_names(found.keys(), weight_map.keys(), path / INDEX, "the files and their index")
    return list(found.values())
