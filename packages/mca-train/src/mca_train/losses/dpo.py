"""The loss of pairs whose answers are compared with a reference, a function for each kind; formulas in `preference`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, log1p

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from mca_train.losses.dpo_loss_types import LossType

_TAU = 0.05  # of the paper


@dataclass(frozen=True)
class Gains:
    """By how much answers are more probable than to the reference.

    Args:
        chosen: ``[pairs]``, of the chosen ones: log-probabilities, minus the reference's.
        rejected: Of the others.
        beta: How strongly the model is kept near the reference.
        smoothing: Share of pairs that are taken to be the wrong way round.
    """

    chosen: Tensor
    rejected: Tensor
    beta: float
    smoothing: float

    @property
    def c(self) -> Tensor:
        """The chosen answers' rewards."""
        return self.beta * self.chosen

    @property
    def r(self) -> Tensor:
        """Those of the others."""
        return self.beta * self.rejected

    @property
    def m(self) -> Tensor:
        """The differences of the two."""
        return self.beta * (self.chosen - self.rejected)


def _sigmoid(of: Gains) -> Tensor:
    return -(1 - of.smoothing) * logsigmoid(of.m) - of.smoothing * logsigmoid(-of.m)


def _ipo(of: Gains) -> Tensor:
    return (of.chosen - of.rejected - 1 / (2 * of.beta)) ** 2


def _robust(of: Gains) -> Tensor:
    right = -(1 - of.smoothing) * logsigmoid(of.m) + of.smoothing * logsigmoid(-of.m)
    return right / (1 - 2 * of.smoothing)


def _exo_pair(of: Gains) -> Tensor:
    right, wrong = logsigmoid(of.m), logsigmoid(-of.m)
    of_right, of_wrong = right - log1p(-of.smoothing), wrong - log(of.smoothing)
    return right.exp() * of_right + wrong.exp() * of_wrong


def _sppo_hard(of: Gains) -> Tensor:
    half = 0.5 / of.beta
    return (of.chosen - half) ** 2 + (of.rejected + half) ** 2


def _discopop(of: Gains) -> Tensor:
    share = torch.sigmoid(of.m / _TAU)
    power = torch.exp(logsigmoid(of.m / _TAU) - of.m)  # share / exp(m), which a large -m alone would overflow
    return -logsigmoid(of.m) * (1 - share) + power


COMPARED: Mapping[LossType, Callable[[Gains], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": lambda of: relu(1 - of.m),
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": lambda of: -logsigmoid(of.c) - (logsigmoid(-of.c) + logsigmoid(-of.r)) / 2,
    "bco_pair": lambda of: -logsigmoid(of.c) - logsigmoid(-of.r),
    "sppo_hard": _sppo_hard,
    "apo_zero": lambda of: torch.sigmoid(-of.c) + torch.sigmoid(of.r),
    "apo_down": lambda of: torch.sigmoid(of.c) + torch.sigmoid(-of.m),
    "discopop": _discopop,
}
"""The loss of each pair, by kind."""
