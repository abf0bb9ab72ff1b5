"""Means of named numbers, on one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from mca_config.errors import McaError
from mca_train import groups
from mca_train.metrics.metric_accumulator import AuxLossMeter, MetricAccumulator
from mca_train.trainer.hf_shims import name_missing_metric


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> MetricAccumulator:
    for name in ("sum_over_data", "max_over_data"):
        monkeypatch.setattr(groups, name, lambda rows: rows)
    differences = {"margin": ("good", "bad")}
    return MetricAccumulator(
        ("good", "bad"), torch.device("cpu"), differences, {"least": "smallest", "most": "largest"}
    )


def added(signals: MetricAccumulator, good: float, bad: float, counts: tuple[float, float]) -> None:
    of_names = {"good": torch.tensor(counts[0]), "bad": torch.tensor(counts[1])}
    signals.add({"good": torch.tensor(good), "bad": torch.tensor(bad)}, of_names)


def test_what_was_not_counted_is_not_reported(signals: MetricAccumulator) -> None:
    added(signals, 6.0, 0.0, (3.0, 0.0))
    signals.add_extremes(torch.tensor([1.0, -2.0]), torch.tensor([0.0, 0.0]))
    assert signals.flush() == {"good": 2.0}
    added(signals, 6.0, 1.0, (3.0, 2.0))
    signals.add_extremes(torch.tensor([1.0, -2.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert signals.flush() == {"good": 2.0, "bad": 0.5, "margin": 1.5, "least": -2.0, "most": 1.0}
    added(signals, 0.0, 0.0, (0.0, 0.0))
    assert signals.flush() == {}


def test_a_best_model_by_what_was_not_counted_is_refused_in_one_line() -> None:
    args: Any = SimpleNamespace(metric_for_best_model="rewards/margins", greater_is_better=True)
    trainer: Any = SimpleNamespace(args=args)
    with (
        pytest.raises(
            McaError, match="metric_for_best_model is 'rewards/margins', which the evaluation does not report"
        ),
        name_missing_metric(args),
    ):
        Trainer._determine_best_metric(trainer, metrics={"eval_loss": 1.0}, trial=None)
    with pytest.raises(KeyError, match="another"), name_missing_metric(args):
        raise KeyError("another")


def test_mtp_losses_of_all_chunks_are_summed_in_fp64() -> None:
    losses = [
        torch.tensor([1 / 3, 1e-12], dtype=torch.float64),
        torch.tensor([1e9, 1.0], dtype=torch.float64),
    ]
    chunks = [SimpleNamespace(mca_mtp_loss=SimpleNamespace(losses=each)) for each in losses]
    accumulator: Any = SimpleNamespace(_prediction=2, _chunks=[*chunks, SimpleNamespace()])
    assert torch.equal(AuxLossMeter._mtp_losses(accumulator), losses[0] + losses[1])
