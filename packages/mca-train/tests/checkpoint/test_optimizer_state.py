"""Optimizer states whose parts a checkpoint holds only in part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_train.checkpoint import optimizer_state


def test_a_leaf_that_is_stored_as_several_tensors_needs_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "optimizer.state.exp_avg.in_proj.weight"
    leaf = SimpleNamespace(key=key)
    for name, value in {
        "shapes_in": lambda folder: {f"{key}.query": (2, 2)},
        "_sharded": lambda *args, **options: {},
        "_require_same_kind": lambda *args: None,
        "_use_saved_keys": lambda *args: None,
        "_leaves": lambda state: [({}, "weight", leaf)],
        "_keys": lambda leaf: {f"{key}.query", f"{key}.key"},
        "_counts_steps": lambda part: True,
        "all_gather": lambda value: [value],
    }.items():
        monkeypatch.setattr(optimizer_state, name, value)
    optimizer: Any = None
    weights: Any = SimpleNamespace(in_fp32=False)
    numbers = optimizer_state.Numbers(1.0, None, "adam")
    with pytest.raises(McaError, match=r"holds no 'exp_avg\.in_proj\.weight' \(weight\)"):
        optimizer_state._load(optimizer, [], tmp_path, numbers, weights, ())
