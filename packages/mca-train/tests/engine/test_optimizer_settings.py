"""Arguments of Megatron's optimizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config import TrainingArguments
from mca_models.megatron import platform
from mca_train.engine import engine, optimizer
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
    repaired: list[Any] = []
    for repair in ("_drop_stub_optimizers", "_share_loss_scale", "rebuild_hybrids"):
        monkeypatch.setattr(optimizer, repair, lambda built, repair=repair: repaired.append((repair, built)))
    chunk: Any = torch.nn.ModuleList([Attention(8, 2, 2)])
    args: Any = SimpleNamespace(optimizer=name)
    built = optimizer.build_optimizer([chunk], args, torch.float32)
    assert hasattr(chunk[0].linear_qkv.weight, "is_qkv") is split
    assert repaired == [
        ("_drop_stub_optimizers", built),
        ("_share_loss_scale", built),
        ("rebuild_hybrids", built),
    ]


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


_DEFAULTS = {
    "optimizer": "adam",
    "lr": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.0,
    "optimizer_offload_fraction": 1.0,
    "initial_loss_scale": 65536.0,
    "store_param_remainders": False,
    "clip_grad": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"max_grad_norm": 0.0}, {"clip_grad": 0.0}),
        ({"max_grad_norm": None}, {"clip_grad": 0.0}),
        ({"learning_rate": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.1}),
        ({"adam_beta1": 0.8, "adam_beta2": 0.95}, {"adam_beta1": 0.8, "adam_beta2": 0.95}),
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, {"optimizer": "sgd", "sgd_momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_setting_of_the_optimizer(
    dtype: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)
    params = getattr(torch, dtype)
    halves = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": params}
    assert optimizer_settings(args, params) == _DEFAULTS | halves | settings


@pytest.mark.parametrize(("given", "in_fp32"), [(None, True), (True, True), (False, False)])
def test_gradients_are_summed_in_fp32_unless_told(
    given: bool | None, in_fp32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    import megatron.core.distributed as upstream

    wrapped: list[Any] = []

    def wrap(config: Any, ddp_config: Any, chunk: Any, **options: Any) -> Any:
        assert config == chunk.config and registered == []
        wrapped.append((ddp_config, options))
        return f"wrapped {chunk.config}"

    unwrapped: list[Any] = []
    registered: list[Any] = []
    deferred: list[Any] = []
    monkeypatch.setattr(upstream, "DistributedDataParallel", wrap)
    monkeypatch.setattr(engine, "unwrap", unwrapped.append)
    monkeypatch.setattr(engine, "register_wrapper", lambda *both: registered.append(both))
    monkeypatch.setattr(engine, "defer_vision_grad_sync", lambda *both: deferred.append(both))
    given_args = {} if given is None else {"accumulate_allreduce_grads_in_fp32": given}
    for overlapped in (False, True):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            overlap_grad_reduce=overlapped,
            **given_args,
        )
        chunks: Any = [SimpleNamespace(config=0), SimpleNamespace(config=1)]
        found = engine.Engine._wrap(SimpleNamespace(_args=args), chunks)  # type: ignore[arg-type]
        assert found == ["wrapped 0", "wrapped 1"] and unwrapped.pop() is chunks
        assert registered == [*zip(chunks, found, strict=True)]
        assert deferred == ([*zip(found, chunks, strict=True)] if overlapped else [])
        registered.clear()
    assert {ddp_config.grad_reduce_in_fp32 for ddp_config, _ in wrapped} == {in_fp32}
    assert [ddp_config.overlap_grad_reduce for ddp_config, _ in wrapped] == [False, False, True, True]
    assert [options["disable_bucketing"] for _, options in wrapped] == [False, True] * 2
