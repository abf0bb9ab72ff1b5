"""Losses and metrics of scores, against sums by hand."""

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train import groups
from mca_train.losses.options import SCORE_METRICS
from mca_train.trainer.scores import LOSSES, METRICS, reward_loss, sequence_scores


def test_regression_squares_the_distance_from_the_values() -> None:
    scores, values = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 2.5], [-4.0, -1.0]])
    assert LOSSES["regression"](scores, values).tolist() == pytest.approx([(4 + 0.25) / 2, 16 / 2])
    assert METRICS["regression"](scores, values).tolist() == pytest.approx([(2 + 0.5) / 2, 4 / 2])


def test_a_single_label_is_the_first_value() -> None:
    scores, values = torch.tensor([[1.0, 2.0, 0.0], [0.5, -1.0, 0.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    sums = [exp(1) + exp(2) + exp(0), exp(0.5) + exp(-1) + exp(0)]
    right = [log(sums[0]) - 2.0, log(sums[1]) - 0.0]
    assert LOSSES["single_label_classification"](scores, values.double()).tolist() == pytest.approx(right)
    assert METRICS["single_label_classification"](scores, values).tolist() == [1.0, 0.0]


def test_each_of_several_labels_counts_alike() -> None:
    scores, values = torch.tensor([[1.0, -2.0], [0.0, 0.5]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    right = [
        (log(1 + exp(-1.0)) + log(1 + exp(2.0))) / 2,
        (log(1 + exp(0.0)) + log(1 + exp(0.5))) / 2,
    ]
    assert LOSSES["multi_label_classification"](scores, values).tolist() == pytest.approx(right)
    assert METRICS["multi_label_classification"](scores, values).tolist() == [0.5, 0.5]


def test_each_loss_of_scores_has_a_metric_with_a_name() -> None:
    assert LOSSES.keys() == METRICS.keys() == SCORE_METRICS.keys()


@pytest.mark.parametrize(("centering", "extra"), [(0.01, 0.01 * 1.75**2), (0.0, 0.0)])
def test_a_reward_exceeds_the_rejected_one_by_the_margin(centering: float, extra: float) -> None:
    found = reward_loss(torch.tensor([1.5]), torch.tensor([0.25]), torch.tensor([0.5]), centering)
    assert found.tolist() == pytest.approx([log(1 + exp(-0.75)) + extra])


def test_the_score_of_a_sequence_is_that_of_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "sum_over_context", lambda values: values)
    batch: Any = SimpleNamespace(
        tokens_remaining=torch.tensor([[1, 0, -1, -1], [2, 1, 0, -1], [-1, -1, -1, -1]]),
        segments=torch.tensor([[0] * 4, [1] * 4, [2] * 4]),
        num_segments=3,
    )
    output = torch.arange(24.0, dtype=torch.bfloat16).view(3, 4, 2)
    scores, real = sequence_scores(output, batch)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[2.0, 3.0], [12.0, 13.0], [0.0, 0.0]]
    assert real.tolist() == [1.0, 1.0, 0.0]
