"""What the referee's runs do not come by: a model that has moved away from its answers, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from mca_train.losses.kto import divergence, model_problems


@pytest.mark.parametrize(("gains", "kl"), [((3.0, 2.0), 1.5), ((-3.0, 2.0), 0.0), ((0.0, 0.0), 0.0)])
def test_the_divergence_is_a_mean_of_at_least_zero(gains: tuple[float, float], kl: float) -> None:
    assert float(divergence(torch.tensor(gains, dtype=torch.float64))) == kl


def test_a_dispatcher_that_needs_one_length_is_refused_to_the_trainer_too() -> None:
    made_with = {"moe_token_dispatcher_type": "allgather", "mtp_num_layers": None, "moe_z_loss_coeff": None}
    (problem,) = model_problems(SimpleNamespace(**made_with, num_moe_experts=None))
    assert problem.startswith("moe_token_dispatcher_type allgather needs samples of one length")
