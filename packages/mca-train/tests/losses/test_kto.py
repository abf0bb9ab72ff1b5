"""Cases that the reference's runs do not cover: a model that has moved away from its answers, and errors."""

from math import exp
from types import SimpleNamespace

import pytest
import torch

from mca_config.errors import McaError
from mca_train.losses.preference import KtoLoss, PreferenceLoss, divergence, kto_model_problems


@pytest.mark.parametrize(
    ("gains", "kl"), [((3.0, 2.0), 1.5), ((3.0, 1.0), 3.0), ((-3.0, 2.0), 0.0), ((0.0, 0.0), 0.0)]
)
def test_the_divergence_is_a_mean_of_at_least_zero(gains: tuple[float, float], kl: float) -> None:
    assert float(divergence(torch.tensor(gains, dtype=torch.float64))) == kl


@pytest.mark.parametrize(
    ("dispatcher", "filled", "reported"),
    [
        ("allgather", False, "moe_token_dispatcher_type allgather needs samples of one length"),
        ("alltoall", True, "moe_pad_expert_input_to_capacity needs samples of one length"),
    ],
)
def test_what_needs_one_length_is_refused_to_the_trainer_too(
    dispatcher: str, filled: bool, reported: str
) -> None:
    made_with = {"moe_token_dispatcher_type": dispatcher, "moe_pad_expert_input_to_capacity": filled}
    others = dict.fromkeys(("mtp_num_layers", "moe_z_loss_coeff", "num_moe_experts"))
    (problem,) = kto_model_problems(SimpleNamespace(**made_with, **others))
    assert problem.startswith(reported)


def test_answers_are_measured_from_the_divergence() -> None:
    loss = KtoLoss(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    found = loss(torch.tensor([1.0, -0.5]), torch.tensor([True, False]), torch.tensor(0.4))
    assert found.tolist() == pytest.approx([2 / (1 + exp(0.5 * 0.6)), 3 / (1 + exp(0.5 * 0.9))])


@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_penalty_of_no_strength_is_refused(beta: float) -> None:
    for loss in (KtoLoss, PreferenceLoss):
        with pytest.raises(McaError, match=f"_beta is {beta}; expected a positive number"):
            loss(beta=beta)
