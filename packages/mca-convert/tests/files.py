"""Reads and writes checkpoints in tests, by means other than the code under test."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mca_config.layout import SIZE_FIELDS
from mca_config.model import SECTION_OF
from mca_convert.cli import main


def hf_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, through the reference library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)


def assert_same_tensors(first: Path, second: Path) -> None:
    one, two = hf_tensors(first), hf_tensors(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and tensor.shape == two[name].shape, name
        assert torch.equal(bits(tensor), bits(two[name])), name


def tree(directory: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }


def read_raw(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


LAYOUT = SIZE_FIELDS | {
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "string": "pipeline_model_parallel_layout",
}


def layout_flags(layout: dict[str, int | str]) -> list[str]:
    """The flags of a layout in short names."""
    return [f"--{LAYOUT[key]}={value}" for key, value in layout.items()]


def refused(source: Path, tmp_path: Path, capsys, *flags: str) -> str:
    """The one error that a conversion of ``source`` fails with; asserts that it leaves nothing."""
    capsys.readouterr()
    output = tmp_path / "parent" / "out"
    assert main(["--checkpoint_path", str(source), "--output_path", str(output), *flags]) == 1
    assert not list((tmp_path / "parent").glob("*")) if (tmp_path / "parent").exists() else True
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    return captured.err[captured.err.index("error: ") :]


def damage_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        header, data = read_raw(file)
        changed = change(header)
        write_raw(file, header if changed is None else changed, data)

    return apply


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def edit_fields(model: dict[str, Any], changes: dict[str, object]) -> None:
    """Change fields of the model of an ``mca_config.json`` in their sections."""
    for name, value in changes.items():
        section = SECTION_OF.get(name)
        if section is None:
            model[name] = value
        else:
            model[section] = {**(model[section] or {}), name: value}
