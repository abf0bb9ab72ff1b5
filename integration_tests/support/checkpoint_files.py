"""Contents of checkpoint directories, and the files that the factory writes after reading one."""

from pathlib import Path

import torch

from layouts import arguments
from mca_models.checkpoint.hf_directory import HfSource
from mca_models.megatron.tensors import to_torch
from mca_models.storage.safetensors import read_header


def read(path: Path) -> dict[str, torch.Tensor]:
    return {info.name: to_torch(info.array().copy()) for info in HfSource(path).tensors()}


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a directory's safetensors files: dtype, shape and bytes."""
    found = {}
    for file in sorted(path.rglob("*.safetensors")):
        for name, info in read_header(file).tensors.items():
            key = name if path == file.parent else f"{file.relative_to(path)}: {name}"
            found[key] = (info.dtype, info.shape, info.array().tobytes())
    return found


def round_trip(pairs: list[tuple[Path, str]], folder: Path) -> None:
    """Loads each checkpoint on its layout and saves it in both formats. Runs on every rank."""
    from mca_models.megatron import AutoModel

    for path, layout in pairs:
        model = AutoModel.from_pretrained(path, arguments(layout))
        model.save_pretrained_as_hf(folder / f"{path.name}-{layout}-hf", max_shard_bytes=50_000)
        model.save_pretrained(folder / f"{path.name}-{layout}-mca")
