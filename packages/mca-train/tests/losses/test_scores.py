"""Losses of scores that differ from their values, against sums by hand."""

from math import exp, log

import pytest
import torch

from mca_train.losses.scores import LOSSES, reward_loss


def test_regression_squares_the_distance_from_the_values() -> None:
    scores, values = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 2.5], [-4.0, -1.0]])
    assert LOSSES["regression"](scores, values).tolist() == pytest.approx([(4 + 0.25) / 2, 16 / 2])


def test_a_reward_exceeds_the_rejected_one_by_the_margin() -> None:
    found = reward_loss(torch.tensor([1.5]), torch.tensor([0.25]), torch.tensor([0.5]), 0.01)
    assert found.tolist() == pytest.approx([log(1 + exp(-0.75)) + 0.01 * 1.75**2])
