"""The weights that a checkpoint was saved with, read one after another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mca_models.megatron.factory import fill
from mca_train.checkpoint import model as model_files
from mca_train.checkpoint.model import saved_weights


def param(name: str) -> Any:
    return SimpleNamespace(
        mca_name=lambda: name, alias_of=None, expert=None, shard=SimpleNamespace(axis=None)
    )


class Source:
    """A checkpoint that counts how often somebody looks through what it stores."""

    looks = 0

    @property
    def params(self) -> list[Any]:
        self.looks += 1
        return [param("first"), param("second")]


def test_what_is_stored_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, values = Source(), {"first": 1.0, "second": 2.0}
    monkeypatch.setattr(model_files, "open_checkpoint", lambda _: source)
    monkeypatch.setattr(
        fill, "read_shard", lambda _, stored, *cut: np.full(3, values[stored.mca_name()], "f4")
    )
    tensors = {name: torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for name in values}
    held = [(SimpleNamespace(param=param(name)), tensor) for name, tensor in tensors.items()]
    model: Any = SimpleNamespace(
        local_params=lambda: held, rank_context=SimpleNamespace(layout=None, coordinates=None)
    )
    read = saved_weights(model, tmp_path)
    found = {name: read(tensor).tolist() for name, tensor in tensors.items()}
    assert found == {name: [value] * 3 for name, value in values.items()}
    assert source.looks == 1
