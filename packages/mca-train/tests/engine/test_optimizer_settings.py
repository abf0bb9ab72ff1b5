"""Arguments of Megatron's optimizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config import TrainingArguments
from mca_models.megatron import platform
from mca_train.engine import optimizer
from mca_train.engine.engine import _fixed_arguments
from mca_train.engine.optimizer import _set_muon_qkv_shapes, optimizer_settings


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ({"decoupled_lr": 1e-3}, False),
        ({"decoupled_lr": 2e-3}, True),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4, "decoupled_min_lr": 1e-4}, False),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4, "decoupled_min_lr": 1e-5}, True),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4}, False),
    ],
)
def test_a_rate_of_the_embedding_that_is_the_others_makes_no_group(
    tmp_path: Path, rates: dict[str, float], kept: bool
) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=1e-3, **rates
    )
    settings = optimizer_settings(args, torch.float32)
    assert settings["lr"] == 1e-3
    assert ("decoupled_lr" in settings) == kept


class Attention(torch.nn.Module):
    """An attention layer with its own heads, as one of several groups of rows or as one."""

    def __init__(self, *rows: int, has_main_param: bool = False) -> None:
        super().__init__()
        self.rows = list(rows)
        self.linear_qkv = torch.nn.Linear(2, sum(rows), bias=False)
        weight: Any = self.linear_qkv.weight
        if has_main_param:
            weight.main_param = weight.detach().clone()

    def qkv_group_rows(self) -> list[int]:
        return self.rows


def test_muon_splits_queries_keys_and_values_by_each_layer_s_heads() -> None:
    layers = torch.nn.ModuleList([Attention(8, 2, 2, has_main_param=True), Attention(4, 4), Attention(6)])
    chunk: Any = torch.nn.Sequential(layers, torch.nn.Linear(2, 2))
    _set_muon_qkv_shapes([chunk])
    found: list[Any] = [layer.linear_qkv.weight for layer in layers]
    found.append(found[0].main_param)
    assert [(each.is_qkv, each.qkv_split_shapes) for each in found] == [
        (True, [8, 2, 2]),
        (True, [4, 4]),
        (False, [6]),
        (True, [8, 2, 2]),
    ]
    assert not hasattr(chunk[1].weight, "is_qkv")


@pytest.mark.parametrize(("name", "split"), [("adam", False), ("muon", True)])
def test_heads_are_split_for_muon_alone(name: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform.prepare()
    import megatron.core.optimizer as upstream

    monkeypatch.setattr(upstream, "OptimizerConfig", lambda **settings: SimpleNamespace(**settings))
    monkeypatch.setattr(upstream, "get_megatron_optimizer", lambda *arguments, **overrides: SimpleNamespace())
    monkeypatch.setattr(optimizer, "optimizer_settings", lambda args, dtype: {})
    monkeypatch.setattr(optimizer, "param_group_overrides", lambda args, config: {})
    monkeypatch.setattr(optimizer, "rebuild_hybrids", lambda built: None)
    chunk: Any = torch.nn.ModuleList([Attention(8, 2, 2)])
    args: Any = SimpleNamespace(optimizer=name)
    optimizer.build_optimizer([chunk], args, torch.float32)
    assert hasattr(chunk[0].linear_qkv.weight, "is_qkv") is split


@pytest.mark.parametrize(
    ("trained", "kept"), [((True, True), 2), ((False, True), 1), ((True, False), 1), ((False, False), 2)]
)
def test_an_optimizer_without_parameters_is_dropped_unless_all_are(
    trained: tuple[bool, ...], kept: int
) -> None:
    chain: Any = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(is_stub_optimizer=not each) for each in trained]
    )
    optimizer._drop_stub_optimizers(chain)
    assert len(chain.chained_optimizers) == kept
    assert kept == 2 or not chain.chained_optimizers[0].is_stub_optimizer


@pytest.mark.parametrize("rate", [None, 1e-4])
def test_rates_of_a_run_are_fixed_if_a_part_has_its_own(rate: float | None, tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", projector_learning_rate=rate
    )
    assert ("learning_rate" in _fixed_arguments(args)) == (rate is not None)
