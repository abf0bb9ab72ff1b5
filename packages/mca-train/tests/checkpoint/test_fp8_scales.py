"""Scales of delayed fp8, without Transformer Engine: stand-ins for its modules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train import groups
from mca_train.checkpoint import fp8_scales


class Fp8(torch.nn.Module):
    """A module that has multiplied in fp8, or not yet."""

    def __init__(self, *passes: str) -> None:
        super().__init__()
        self.num_gemms = 1
        self.fp8_meta = {
            key: SimpleNamespace(scale=torch.full((3,), 2.0), amax_history=torch.full((4, 3), 1.0))
            for key in passes
        }


def test_scales_of_modules_that_have_run_are_written_with_the_next_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp8_scales, "_delayed_recipe", lambda chunks: "delayed")
    monkeypatch.setattr(groups, "is_stage_leader", lambda: True)
    monkeypatch.setattr(groups, "max_over_stage", lambda values: values + 5)
    chunk: Any = torch.nn.Module()
    chunk.used, chunk.unused = Fp8("scaling_fwd", "scaling_bwd"), Fp8()
    found = fp8_scales.collect([chunk])
    assert found.keys() == {
        f"used.{key}.{name}" for key in ("scaling_fwd", "scaling_bwd") for name in ("scale", "amax_history")
    }
    assert found["used.scaling_fwd.amax_history"].tolist() == [[6.0] * 3, *[[1.0] * 3] * 3]
    assert found["used.scaling_bwd.amax_history"].tolist() == [[1.0] * 3] * 4
    assert found["used.scaling_fwd.scale"].tolist() == [2.0] * 3
