"""What the referee's runs do not come by: a model that has moved away from the answers it is measured on."""

import pytest
import torch

from mca_train.losses.kto import divergence


@pytest.mark.parametrize(("gains", "kl"), [((3.0, 2.0), 1.5), ((-3.0, 2.0), 0.0), ((0.0, 0.0), 0.0)])
def test_the_divergence_is_a_mean_of_at_least_zero(gains: tuple[float, float], kl: float) -> None:
    assert float(divergence(torch.tensor(gains, dtype=torch.float64))) == kl
