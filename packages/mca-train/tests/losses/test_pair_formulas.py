"""Every formula of preference losses on pairs on both sides of the margin, written out with the math module."""

from collections.abc import Callable
from math import exp, log
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from mca_config.errors import McaError
from mca_train import groups
from mca_train.losses.options import LossType
from mca_train.losses.preference import (
    REFERENCE_LOSSES,
    PairLogps,
    PreferenceLoss,
    counted_sequences,
    model_problems,
    reference_problems,
    split_pairs,
)

BETA, SMOOTHING = 0.3, 0.2
POLICY = PairLogps(torch.tensor([-6.0, -20.0, -3.0]), torch.tensor([-9.0, -14.0, -8.0]))
REFERENCE = PairLogps(torch.tensor([-7.0, -18.5, -3.0]), torch.tensor([-8.0, -15.0, -3.0]))
TOKENS = PairLogps(torch.tensor([3.0, 5.0, 1.0]), torch.tensor([2.0, 7.0, 0.0]))
GAINS = [(1.0, -1.0), (-1.5, 1.0), (0.0, -5.0)]
MEANS = [(1 / 3, -1 / 2), (-1.5 / 5, 1 / 7), (0.0, -5.0)]


def s(x: float) -> float:
    return 1 / (1 + exp(-x))


def exo_pair(c: float, r: float) -> float:
    m = BETA * (c - r)
    return s(m) * (log(s(m)) - log(1 - SMOOTHING)) + s(-m) * (log(s(-m)) - log(SMOOTHING))


def discopop(c: float, r: float) -> float:
    m = BETA * (c - r)
    t = s(m / 0.05)
    return -(1 - t) * log(s(m)) + t * exp(-m)


def smoothed(c: float, r: float) -> float:
    m = BETA * (c - r)
    return -(1 - SMOOTHING) * log(s(m)) - SMOOTHING * log(s(-m))


def robust(c: float, r: float) -> float:
    m = BETA * (c - r)
    return (-(1 - SMOOTHING) * log(s(m)) + SMOOTHING * log(s(-m))) / (1 - 2 * SMOOTHING)


FORMULAS: dict[str, tuple[list[tuple[float, float]], float, Callable[[float, float], float]]] = {
    "sigmoid": (GAINS, SMOOTHING, smoothed),
    "robust": (GAINS, SMOOTHING, robust),
    "exo_pair": (GAINS, SMOOTHING, exo_pair),
    "hinge": (GAINS, 0.0, lambda c, r: max(0.0, 1 - BETA * (c - r))),
    "nca_pair": (
        GAINS,
        0.0,
        lambda c, r: -log(s(BETA * c)) - log(s(-BETA * c)) / 2 - log(s(-BETA * r)) / 2,
    ),
    "bco_pair": (GAINS, 0.0, lambda c, r: -log(s(BETA * c)) - log(s(-BETA * r))),
    "sppo_hard": (
        GAINS,
        0.0,
        lambda c, r: ((BETA * c - 0.5) ** 2 + (BETA * r + 0.5) ** 2) / BETA**2,
    ),
    "apo_zero": (GAINS, 0.0, lambda c, r: s(-BETA * c) + s(BETA * r)),
    "apo_down": (GAINS, 0.0, lambda c, r: s(BETA * c) + s(-BETA * (c - r))),
    "discopop": (GAINS, 0.0, discopop),
    "sigmoid_norm": (MEANS, 0.0, lambda c, r: -log(s(BETA * (c - r)))),
    "ipo": (MEANS, 0.0, lambda c, r: (BETA * (c - r) - 0.5) ** 2 / BETA**2),
}


def test_every_loss_with_a_reference_has_a_formula_here() -> None:
    assert FORMULAS.keys() == REFERENCE_LOSSES.keys() == set(get_args(LossType)) - {"simpo", "orpo"}


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_loss_with_a_reference_is_its_formula(kind: Any) -> None:
    gains, smoothing, formula = FORMULAS[kind]
    loss = PreferenceLoss(kind=kind, beta=BETA, label_smoothing=smoothing)
    assert loss.needs_reference
    right = [formula(*pair) for pair in gains]
    assert loss(POLICY, TOKENS, REFERENCE).tolist() == pytest.approx(right, rel=1e-5)
    with pytest.raises(McaError, match=f"dpo_loss {kind} needs a reference"):
        loss(POLICY, TOKENS)


def test_the_margin_of_simpo_is_a_half_unless_set() -> None:
    loss = PreferenceLoss(kind="simpo", beta=BETA)
    means = [(-6 / 3, -9 / 2), (-20 / 5, -14 / 7), (-3.0, -8.0)]
    right = [-log(s(BETA * (chosen - rejected) - 0.5)) for chosen, rejected in means]
    assert loss(POLICY, TOKENS).tolist() == pytest.approx(right)
    none = PreferenceLoss(kind="simpo", beta=BETA, simpo_gamma=0.0)
    right = [-log(s(BETA * (chosen - rejected))) for chosen, rejected in means]
    assert none(POLICY, TOKENS).tolist() == pytest.approx(right)


@pytest.mark.parametrize(
    ("kind", "sums"), [("sigmoid", True), ("ipo", True), ("simpo", False), ("orpo", False)]
)
def test_logged_values_are_means_without_a_reference_alone(kind: Any, sums: bool) -> None:
    loss = PreferenceLoss(kind=kind, beta=BETA)
    assert loss.needs_reference is sums
    logged = loss.logged_logps(POLICY, TOKENS)
    assert logged.chosen.tolist() == pytest.approx([-6, -20, -3] if sums else [-2, -4, -3])
    assert logged.rejected.tolist() == pytest.approx([-9, -14, -8] if sums else [-4.5, -2, -8])
    plain, gained = loss.rewards(POLICY, None), loss.rewards(POLICY, REFERENCE)
    assert plain.chosen.tolist() == pytest.approx([BETA * x for x in (-6, -20, -3)])
    assert plain.rejected.tolist() == pytest.approx([BETA * x for x in (-9, -14, -8)])
    assert gained.chosen.tolist() == pytest.approx([BETA * chosen for chosen, _ in GAINS])
    assert gained.rejected.tolist() == pytest.approx([BETA * rejected for _, rejected in GAINS])


@pytest.mark.parametrize("count", [4, 5])
def test_answers_alternate_and_a_last_one_without_partner_is_left_out(count: int) -> None:
    pairs = split_pairs(torch.arange(count))
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([0, 2], [1, 3])


def test_a_sequence_of_one_token_counts_and_padding_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "sum_over_context", lambda values: values)
    batch: Any = SimpleNamespace(
        tokens_remaining=torch.tensor([[0, -1, 1, 0, -1]]),
        segments=torch.tensor([[0, 0, 1, 1, 2]]),
        num_segments=4,
    )
    assert counted_sequences(batch).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("labels", "sees", "model_sees", "found"),
    [
        (None, False, False, []),
        (None, True, True, []),
        (None, True, False, []),
        (None, False, True, ["the reference takes no images"]),
        (1, True, True, ["the reference has a reward head and no log-probabilities"]),
    ],
)
def test_a_reference_is_a_language_model_that_sees_what_the_model_sees(
    labels: int | None, sees: bool, model_sees: bool, found: list[str]
) -> None:
    def config(labels: int | None, sees: bool) -> Any:
        head = SimpleNamespace(num_labels=labels, head_kind="reward")
        return SimpleNamespace(head=head, vision=object() if sees else None)

    problems = list(reference_problems(config(labels, sees), config(None, model_sees)))
    assert len(problems) == len(found)
    assert all(problem.startswith(start) for problem, start in zip(problems, found, strict=True))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, []),
        ({"mtp_num_layers": 1}, ["MTP layers are not supported"]),
        ({"num_moe_experts": 4}, []),
        ({"moe_z_loss_coeff": 0.1}, []),
        ({"num_moe_experts": 4, "moe_z_loss_coeff": 0.1}, ["MoE auxiliary losses are weighted by tokens"]),
        (
            {
                "num_moe_experts": 4,
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.1,
                "mtp_num_layers": 2,
            },
            ["MTP layers are not supported", "MoE auxiliary losses are weighted by tokens"],
        ),
    ],
)
def test_losses_that_are_weighted_by_tokens_are_refused(fields: dict[str, Any], found: list[str]) -> None:
    plain = {
        "mtp_num_layers": None,
        "num_moe_experts": None,
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    problems = list(model_problems(SimpleNamespace(**(plain | fields))))  # type: ignore[arg-type]
    assert len(problems) == len(found)
    assert all(problem.startswith(start) for problem, start in zip(problems, found, strict=True))
