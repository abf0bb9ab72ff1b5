"""Scales of delayed fp8, without Transformer Engine: stand-ins for its modules."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train import groups
from mca_train.checkpoint import fp8_scales


def rows(*values: float) -> torch.Tensor:
    """Return a row of three equal numbers for each value."""
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 3)


class Fp8(torch.nn.Module):
    """A module that has multiplied in fp8, or not yet."""

    def __init__(self, *passes: str) -> None:
        super().__init__()
        self.num_gemms = 1
        self.fp8_meta = {
            key: SimpleNamespace(scale=torch.full((3,), 2.0), amax_history=rows(1, 2, 3, 4)) for key in passes
        }


def test_scales_of_modules_that_have_run_are_written_with_the_next_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp8_scales, "_delayed_recipe", lambda chunks: "delayed")
    monkeypatch.setattr(groups, "is_stage_leader", lambda: True)
    monkeypatch.setattr(groups, "max_over_stage", lambda values: lengths.append(len(values)) or values + 5)
    lengths: list[int] = []
    chunk: Any = torch.nn.Module()
    chunk.used, chunk.unused = Fp8("scaling_fwd", "scaling_bwd"), Fp8()
    del chunk.unused.num_gemms  # one product
    found = fp8_scales.collect([chunk])
    assert lengths == [6], "as many on each rank"
    assert found.keys() == {
        f"used.{key}.{name}" for key in ("scaling_fwd", "scaling_bwd") for name in ("scale", "amax_history")
    }
    assert found["used.scaling_fwd.amax_history"].tolist() == rows(6, 2, 3, 4).tolist()
    assert found["used.scaling_bwd.amax_history"].tolist() == rows(1, 2, 3, 4).tolist()
    assert found["used.scaling_fwd.scale"].tolist() == [2.0] * 3


@pytest.mark.parametrize("gemms", [1, 2])
def test_a_module_takes_scales_of_as_many_products(gemms: int) -> None:
    recipe = SimpleNamespace()
    module: Any = Fp8()
    module.num_gemms = 2

    def begin(_: object) -> None:
        for key in ("scaling_fwd", "scaling_bwd"):
            module.fp8_meta[key] = Fp8("of").fp8_meta["of"]
            module.fp8_meta[key].scale = torch.zeros(6)
            module.fp8_meta[key].amax_history = torch.zeros(4, 6)

    module.init_fp8_meta_tensors = begin
    numbers = {"scale": torch.arange(3.0 * gemms), "amax_history": torch.ones(2, 3 * gemms)}
    saved: Any = {
        f"name.{key}.{what}": SimpleNamespace(shape=value.shape, read=value.numpy)
        for key in ("scaling_fwd", "scaling_bwd")
        for what, value in numbers.items()
    }
    assert fp8_scales._restore("name", module, recipe, saved) == (gemms == 2)
    if gemms == 2:
        assert module.fp8_meta["num_gemms"] == 2
        assert module.fp8_meta["scaling_bwd"].scale.tolist() == [0, 1, 2, 3, 4, 5]
        assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [1, 1, 0, 0]


def test_modules_without_saved_scales_start_over_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fp8_scales, "_delayed_recipe", lambda chunks: "delayed")
    chunk: Any = torch.nn.Module()
    chunk.first, chunk.second = Fp8("scaling_fwd"), Fp8("scaling_fwd")
    fp8_scales.load(tmp_path, [chunk])
    assert f"{tmp_path}: holds no fp8 scales of 2 modules (first, ...), which start over" in caplog.text
    assert chunk.first.fp8_meta["scaling_fwd"].scale.tolist() == [2.0] * 3
    monkeypatch.setattr(fp8_scales, "_delayed_recipe", lambda chunks: None)
    caplog.clear()
    fp8_scales.load(tmp_path, [chunk])
    assert not caplog.records


def test_scales_are_named_by_the_layer_in_the_model_and_the_expert_on_its_rank() -> None:
    chunk: Any = torch.nn.Module()
    chunk.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for place, layer in enumerate(chunk.layers):
        layer.layer_number = 5 + place  # Megatron counts from 1; four layers are on stages before
        layer.fc = Fp8("scaling_fwd")
    chunk.layers[1].local_experts = torch.nn.ModuleList([Fp8(), Fp8()])
    assert [name for name, _ in fp8_scales._modules([chunk])] == [
        "layers.4.fc",
        "layers.5.fc",
        "layers.5.local_experts.0_of_2",
        "layers.5.local_experts.1_of_2",
    ]
