"""The losses of pairs that the comparison of formulas with TRL leaves out, on two pairs of different lengths."""

from math import exp, expm1, log

import pytest
import torch

from mca_config.errors import McaError
from mca_train.losses.preference import PairLogps, PreferenceLoss

CHOSEN, REJECTED = (-6.0, -20.0), (-9.0, -14.0)
TOKENS = PairLogps(torch.tensor([3.0, 5.0]), torch.tensor([2.0, 7.0]))
POLICY = PairLogps(torch.tensor(CHOSEN), torch.tensor(REJECTED))
REFERENCE = PairLogps(torch.tensor([-7.0, -19.0]), torch.tensor([-8.0, -15.0]))
MEANS = [(-6 / 3, -9 / 2), (-20 / 5, -14 / 7)]


def log_sigmoid(x: float) -> float:
    return -log(1 + exp(-x))


def test_rpo_adds_the_cross_entropy_of_the_chosen_answer_as_a_mean_over_its_tokens() -> None:
    plain = PreferenceLoss(kind="sigmoid", beta=0.3)(POLICY, TOKENS, REFERENCE)
    found = PreferenceLoss(kind="sigmoid", beta=0.3, rpo_alpha=0.7)(POLICY, TOKENS, REFERENCE)
    assert (found - plain).tolist() == pytest.approx([0.7 * 6 / 3, 0.7 * 20 / 5])
    margins = [(-6 + 7) - (-9 + 8), (-20 + 19) - (-14 + 15)]
    assert plain.tolist() == pytest.approx([-log_sigmoid(0.3 * margin) for margin in margins])


def test_simpo_compares_means_over_tokens_with_a_margin() -> None:
    found = PreferenceLoss(kind="simpo", beta=2.0, simpo_gamma=0.9)(POLICY, TOKENS)
    right = [-log_sigmoid(2.0 * (chosen - rejected) - 0.9) for chosen, rejected in MEANS]
    assert found.tolist() == pytest.approx(right)


def test_orpo_adds_odds_to_the_chosen_answers_cross_entropy() -> None:
    found = PreferenceLoss(kind="orpo", beta=0.4)(POLICY, TOKENS)

    def log_odds(x: float) -> float:
        return x - log(-expm1(x))

    right = [-chosen - 0.4 * log_sigmoid(log_odds(chosen) - log_odds(rejected)) for chosen, rejected in MEANS]
    assert found.tolist() == pytest.approx(right)


@pytest.mark.parametrize("smoothing", [0.5, -0.1])
def test_half_of_the_labels_cannot_be_wrong(smoothing: float) -> None:
    with pytest.raises(McaError, match=r"expected 0 or more and below 0\.5"):
        PreferenceLoss(kind="sigmoid", beta=0.3, label_smoothing=smoothing)


def test_a_smoothed_margin_counts_the_wrong_order_too() -> None:
    found = PreferenceLoss(kind="sigmoid", beta=0.3, label_smoothing=0.2)(POLICY, TOKENS, REFERENCE)
    margins = [0.3 * ((-6 + 7) - (-9 + 8)), 0.3 * ((-20 + 19) - (-14 + 15))]
    right = [-0.8 * log_sigmoid(margin) - 0.2 * log_sigmoid(-margin) for margin in margins]
    assert found.tolist() == pytest.approx(right)
