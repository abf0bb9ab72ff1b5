"""DPO losses of pairs with a reference model, one function for each type; formulas in `preference`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, log1p

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from mca_train.losses.options import LossType

_TAU = 0.05  # as in the paper


@dataclass(frozen=True)
class LogRatios:
    """Log-probabilities of answers minus those of the reference.

    Args:
        chosen: ``[pairs]``, of the chosen answers.
        rejected: ``[pairs]``, of the rejected answers.
        beta: Strength of the KL penalty.
        smoothing: Assumed fraction of pairs in the wrong order.
    """

    chosen: Tensor
    rejected: Tensor
    beta: float
    smoothing: float

    @property
    def chosen_reward(self) -> Tensor:
        """Return the rewards of the chosen answers."""
        return self.beta * self.chosen

    @property
    def rejected_reward(self) -> Tensor:
        """Return the rewards of the rejected answers."""
        return self.beta * self.rejected

    @property
    def margin(self) -> Tensor:
        """Return the reward margins."""
        return self.beta * (self.chosen - self.rejected)


def _sigmoid(x: LogRatios) -> Tensor:
    return -(1 - x.smoothing) * logsigmoid(x.margin) - x.smoothing * logsigmoid(-x.margin)


def _ipo(x: LogRatios) -> Tensor:
    return (x.chosen - x.rejected - 1 / (2 * x.beta)) ** 2


def _robust(x: LogRatios) -> Tensor:
    right = -(1 - x.smoothing) * logsigmoid(x.margin) + x.smoothing * logsigmoid(-x.margin)
    return right / (1 - 2 * x.smoothing)


def _exo_pair(x: LogRatios) -> Tensor:
    right, wrong = logsigmoid(x.margin), logsigmoid(-x.margin)
    right_ratio, wrong_ratio = right - log1p(-x.smoothing), wrong - log(x.smoothing)
    return right.exp() * right_ratio + wrong.exp() * wrong_ratio


def _sppo_hard(x: LogRatios) -> Tensor:
    half = 0.5 / x.beta
    return (x.chosen - half) ** 2 + (x.rejected + half) ** 2


def _discopop(x: LogRatios) -> Tensor:
    share = torch.sigmoid(x.margin / _TAU)
    power = torch.exp(
        logsigmoid(x.margin / _TAU) - x.margin
    )  # share / exp(m), written so that a large -m does not overflow
    return -logsigmoid(x.margin) * (1 - share) + power


REFERENCE_LOSSES: Mapping[LossType, Callable[[LogRatios], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": lambda x: relu(1 - x.margin),
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": lambda x: (
        -logsigmoid(x.chosen_reward) - (logsigmoid(-x.chosen_reward) + logsigmoid(-x.rejected_reward)) / 2
    ),
    "bco_pair": lambda x: -logsigmoid(x.chosen_reward) - logsigmoid(-x.rejected_reward),
    "sppo_hard": _sppo_hard,
    "apo_zero": lambda x: torch.sigmoid(-x.chosen_reward) + torch.sigmoid(x.rejected_reward),
    "apo_down": lambda x: torch.sigmoid(x.chosen_reward) + torch.sigmoid(-x.margin),
    "discopop": _discopop,
}
"""Loss of each pair, by ``dpo_loss``."""
