"""Optimizer states whose parts a checkpoint holds only in part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_the_step_is_the_largest_of_all_parts() -> None:
    """A part whose parameters are not trained yet has counted fewer steps."""
    parts: Any = {
        0: {"optimizer": {"param_groups": [{"step": 3}, {"step": 5}]}},
        1: {"param_groups": [{"step": 4}]},
    }
    assert optimizer_state._numbers(parts).step == 5.0
    assert optimizer_state._numbers({"optimizer": {"state": {"common_step": 7}}}).step == 7.0
    assert optimizer_state._numbers({}).step is None


@pytest.mark.parametrize(("offset", "kept"), [(0, 4), (4, 2), (8, 0)])
def test_padded_rows_that_a_checkpoint_lacks_are_zero_on_each_rank(offset: int, kept: int) -> None:
    leaf: Any = SimpleNamespace(allow_shape_mismatch=True, prepend_axis_num=1, global_offset=(0, offset))
    found: Any = optimizer_state._without_padding(torch.ones(4, 2), leaf, (3, 6))
    assert found.any(1).tolist() == [True] * kept + [False] * (4 - kept)
