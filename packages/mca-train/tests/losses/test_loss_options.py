"""Defaults of the losses' options, the options that go together, and the arguments that they exclude."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_train.losses import options
from mca_train.losses.options import REFUSED
from mca_train.losses.preference_options import KtoOptions, PreferenceOptions


def test_the_defaults_are_those_of_trl() -> None:
    found = vars(PreferenceOptions())
    assert found == {
        "kind": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "simpo_gamma": None,
        "rpo_alpha": None,
    }
    assert vars(KtoOptions()) == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        *[({"kind": kind}, f"dpo_loss is {kind!r}; {why}") for kind, why in REFUSED.items()],
        ({"kind": "other"}, "dpo_loss is 'other'; expected sigmoid, hinge, ipo"),
        ({"simpo_gamma": 0.5}, "simpo_gamma is for dpo_loss simpo, not sigmoid; remove it"),
        ({"simpo_gamma": 0.0}, "simpo_gamma is for dpo_loss simpo, not sigmoid; remove it"),
        ({"kind": "simpo", "simpo_gamma": 0.0}, None),
        ({"kind": "simpo", "rpo_alpha": 0.5}, None),
        ({"kind": "orpo"}, None),
        (
            {"kind": "orpo", "rpo_alpha": 0.0},
            "rpo_alpha: dpo_loss orpo has the chosen answer's cross entropy",
        ),
        ({"rpo_alpha": -0.5}, "rpo_alpha is -0.5; expected 0 or more"),
        ({"rpo_alpha": 0.0}, None),
        ({"label_smoothing": 0.1}, None),
        ({"kind": "robust", "label_smoothing": 0.1}, None),
        ({"kind": "robust"}, None),
        ({"kind": "exo_pair", "label_smoothing": 0.1}, None),
        ({"kind": "exo_pair"}, "dpo_loss exo_pair needs dpo_label_smoothing above 0"),
        (
            {"kind": "ipo", "label_smoothing": 0.1},
            "dpo_label_smoothing is for dpo_loss sigmoid, robust, exo_pair, not ipo; remove it",
        ),
        (
            {"kind": "sigmoid_norm", "label_smoothing": 0.1},
            "dpo_label_smoothing is for dpo_loss sigmoid, robust, exo_pair, not sigmoid_norm",
        ),
    ],
)
def test_options_of_one_loss_are_refused_for_others(given: dict[str, Any], error: str | None) -> None:
    if error is None:
        PreferenceOptions(**given)
        return
    with pytest.raises(McaError, match="^" + re.escape(error)):
        PreferenceOptions(**given)


@pytest.mark.parametrize("name", ["desirable_weight", "undesirable_weight"])
def test_a_weight_below_zero_is_named_with_its_value(name: str) -> None:
    with pytest.raises(McaError, match=f"^{name} is -0.25; expected 0 or more$"):
        KtoOptions(**{name: -0.25})
    assert getattr(KtoOptions(**{name: 0.0}), name) == 0.0


SMOOTHED, CHUNKED, OVERLAPPED = "label_smoothing_factor", "loss_chunk_size", "overlap_param_gather"


@pytest.mark.parametrize(
    ("check", "excluded"),
    [
        (options.pair_key_problems, [SMOOTHED]),
        (options.kto_key_problems, [SMOOTHED, OVERLAPPED]),
        (options.score_key_problems, [SMOOTHED, CHUNKED]),
        (options.adapter_reference_problems, [OVERLAPPED]),
    ],
)
def test_each_excluded_argument_is_one_problem_that_names_it(check: Any, excluded: list[str]) -> None:
    plain = {SMOOTHED: 0.0, CHUNKED: None, OVERLAPPED: False}
    changes = {SMOOTHED: 0.1, CHUNKED: 64, OVERLAPPED: True}
    assert list(check(SimpleNamespace(**plain))) == []
    for name, value in changes.items():
        problems = list(check(SimpleNamespace(**(plain | {name: value}))))
        assert [problem.split()[0] for problem in problems] == [name] * (name in excluded)
    assert [problem.split()[0] for problem in check(SimpleNamespace(**changes))] == excluded


@pytest.mark.parametrize(("samples", "number"), [(0, "none"), (1, "only one"), (2, "")])
def test_a_dataset_of_kto_has_two_samples(samples: int, number: str) -> None:
    problems = list(options.kto_dataset_problems(samples))
    assert [number] * bool(number) == [each.split(" has ")[1].split(";")[0] for each in problems]


@pytest.mark.parametrize(("samples", "refused"), [(1, True), (2, False), (3, False)])
def test_a_step_of_kto_has_two_samples(samples: int, refused: bool) -> None:
    assert bool(list(options.kto_step_problems(samples))) is refused
