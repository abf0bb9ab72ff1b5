"""Means of named numbers, on one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from mca_config.errors import McaError
from mca_train import groups
from mca_train.metrics import meters
from mca_train.metrics.meters import AuxLossMeter, MetricAccumulator, SourceLosses
from mca_train.trainer.base import name_missing_metric


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


def test_a_metric_without_a_name_in_the_log_is_refused(signals: MetricAccumulator) -> None:
    with pytest.raises(McaError, match="metric 'mine' is not in metric_names; add it"):
        signals.add({"mine": torch.tensor(1.0)}, 1.0)


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


@pytest.mark.parametrize(("experts", "layers"), [(None, None), (0, 0), (8, 2), (None, 1), (8, None)])
def test_losses_of_layers_that_a_model_lacks_are_not_logged(
    experts: int | None, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routers on this stage and one on another, over two steps."""
    routers = [
        SimpleNamespace(mca_aux_loss=SimpleNamespace(losses={"z_loss": torch.tensor(value)}))
        for value in (1.0, 2.0)
    ]
    monkeypatch.setattr(meters, "routers", lambda chunks: routers)
    monkeypatch.setattr(groups, "sum_over_stage", lambda rows: rows)
    monkeypatch.setattr(groups, "sum_over_data", lambda rows: 2 * rows)
    monkeypatch.setattr(
        groups,
        "gather_over_stages",
        lambda stage: [stage, (1, {"z_loss": [6.0, 9.0][: len(stage[1]["z_loss"])]})],
    )
    chunk: Any = SimpleNamespace(
        config=SimpleNamespace(num_moe_experts=experts, mtp_num_layers=layers),
        mca_mtp_loss=SimpleNamespace(losses=torch.arange(1.0, 1 + (layers or 0), dtype=torch.float64)),
    )
    made = AuxLossMeter([chunk])
    assert (made._prediction, made._has_experts) == (layers or 0, bool(experts))
    made.add_step()
    made.add_step()
    expected = {f"mtp_{depth}_loss": 2.0 * depth for depth in range(1, 1 + (layers or 0))}
    if experts:
        expected["moe_z_loss"] = ((1 + 2 + 6) / 3 + (1 + 2 + 9) / 3) / 2
    state = made.state()
    assert state["steps"] == 2
    assert made.flush() == pytest.approx(expected)
    made.restore(state)
    made.add_step()
    assert made.state()["steps"] == 3
    if experts:
        assert made.flush()["moe_z_loss"] == pytest.approx((3 + 4 + 3) / 3, rel=1e-6)
    else:
        assert made.flush().keys() == expected.keys()


def test_sums_of_many_values_are_kept_in_fp64(signals: MetricAccumulator) -> None:
    """fp32 would lose the second of two values that differ by 2**30."""
    added(signals, 2.0**30, 1.0, (1.0, 1.0))
    added(signals, 1.0, 1.0, (1.0, 1.0))
    signals.add_extremes(torch.tensor([2.0**30 + 1], dtype=torch.float64), torch.ones(1))
    reported = signals.flush()
    assert reported["good"] * 2 == 2.0**30 + 1
    assert reported["least"] == reported["most"] == 2.0**30 + 1
    signals.add_extremes(torch.tensor([2.0**30 + 3], dtype=torch.float64), torch.ones(1))
    assert signals.flush()["most"] == 2.0**30 + 3


def test_each_source_with_targets_has_the_mean_of_their_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last segment of a micro-batch is padding, which has no source."""
    monkeypatch.setattr(meters.groups, "sum_over_data", lambda rows: rows)
    meter = SourceLosses(("a", "b", "c"), torch.device("cpu"))
    segments, mask = torch.tensor([[0, 0, 1, 2]]), torch.tensor([[1.0, 0, 1, 0]])
    for first, second in ((3.0, 5.0), (6.0, 8.0)):
        losses = torch.tensor([[first, 9.0, second, 7.0]])
        for sources in (torch.tensor([0, 1]), torch.tensor([0, 0]), None):
            batch: Any = SimpleNamespace(sources=sources, segments=segments, loss_mask=mask)
            meter.add_tokens(losses, batch)
        meter.end_step()
    assert meter.flush() == {"loss/a": (3 + 3 + 5 + 6 + 6 + 8) / 6, "loss/b": (5 + 8) / 2}
    assert meter.flush() == {}
    assert SourceLosses((), torch.device("cpu")).flush() == {}
