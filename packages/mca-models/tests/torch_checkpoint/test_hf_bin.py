"""``pytorch_model.bin``: the same model as from safetensors, in however many files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import save

from mca_config.errors import McaError
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.storage.source import read_shard


def pickled(folder: Path, *, sharded: bool = False, strided: bool = False) -> Path:
    """The same directory with its weights in files of torch.save."""
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if strided:
        weights = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in weights.items()}
    if not sharded:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    names, files = sorted(weights), ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    where = {name: files[number % 2] for number, name in enumerate(names)}
    for file in files:
        torch.save({n: weights[n] for n in names if where[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("changes", [{}, {"sharded": True}, {"sharded": True, "strided": True}])
def test_it_is_the_same_model(tmp_path: Path, changes: dict[str, bool]) -> None:
    expected = open_checkpoint(save("llama", tmp_path / "safe"))
    found = open_checkpoint(pickled(save("llama", tmp_path / "bin"), **changes))
    for param in expected.params:
        for rank in range(2):
            pieces = (read_shard(source, param, rank, 2) for source in (expected, found))
            assert np.array_equal(*(piece.view(np.uint8) for piece in pieces)), param.mca_name()


def test_safetensors_are_read_where_there_are_both(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "both")
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    open_checkpoint(folder)


def test_a_pickle_that_would_do_something_is_refused(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    torch.save({"a": print}, folder / "pytorch_model.bin")
    with pytest.raises(McaError, match=r"pytorch_model\.bin: the pickle names \w+\.print"):
        open_checkpoint(folder)


def test_a_missing_shard_and_a_wrong_index_are_named(tmp_path: Path) -> None:
    folder = pickled(save("llama", tmp_path / "shards"), sharded=True)
    index = folder / "pytorch_model.bin.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"extra": "pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(McaError, match=r"index.json: 1 missing tensor \(extra\)"):
        open_checkpoint(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(McaError, match=r"pytorch_model-00002-of-00002\.bin"):
        open_checkpoint(folder)
