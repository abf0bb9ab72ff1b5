"""Names of tensors that are not finite."""

from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.engine import finite


@pytest.mark.parametrize(
    ("count", "more"), [(0, ""), (1, ""), (3, ""), (4, " and 1 more"), (9, " and 6 more")]
)
def test_a_few_tensors_are_named_and_the_others_counted(
    count: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "_SHOWN", 3)
    monkeypatch.setattr(finite, "all_gather", lambda values: [[], values])
    tensors = [(f"w{number}", torch.tensor([1.0, float("nan")])) for number in range(count)]
    found = finite._describe_non_finite([("whole", torch.ones(2)), ("none", None), *tensors])
    named = ", ".join(f"w{number} (rank 1: nan)" for number in range(min(count, 3)))
    assert found == named + more


NAN, INF = float("nan"), float("inf")


def weight(gradient: float | None, main: float | None = None) -> torch.Tensor:
    """Return a parameter with a gradient, and perhaps with that of Megatron's buffer."""
    tensor: Any = torch.nn.Parameter(torch.zeros(2))
    tensor.grad = None if gradient is None else torch.tensor([1.0, gradient])
    if main is not None:
        tensor.main_grad = torch.tensor([1.0, main])
    return tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (None, None, None),
        (1.0, None, None),
        (None, 2.0, None),
        (1.0, 2.0, None),
        (NAN, 2.0, "the loss is nan"),
        (-INF, NAN, "the loss is -inf"),
        (1.0, INF, "the gradient norm is inf"),
        (None, NAN, "the gradient norm is nan"),
    ],
)
def test_a_step_that_is_not_finite_names_its_gradients(
    loss: float | None, norm: float | None, what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has one of the same names and a second name; Megatron's buffer comes first."""
    mine = [("a", "inf"), ("b", "nan")]
    monkeypatch.setattr(finite, "all_gather", lambda own: [own, [("b", "inf"), ("d", "inf")]])
    trained = [("a", weight(INF)), ("b", weight(1.0, NAN)), ("c", weight(NAN, 1.0)), ("d", weight(None))]
    if what is None:
        finite.require_finite(loss, norm, 7, trained)
        return
    named = ", ".join(f"{name} (rank 0: {kind})" for name, kind in mine)
    with pytest.raises(McaError) as caught:
        finite.require_finite(loss, norm, 7, trained)
    begin = f"step 7: {what}; gradients that are not finite: {named}, d (rank 1: inf). Resume from"
    assert str(caught.value).startswith(begin)
    monkeypatch.setattr(finite, "all_gather", lambda own: [[], []])
    with pytest.raises(McaError, match=f"^step 7: {what}[.] Resume from"):
        finite.require_finite(loss, norm, 7, trained)


def test_weights_that_are_not_finite_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "all_gather", lambda own: [own])
    finite.require_finite_weights(3, [("a", torch.ones(2))])
    both = torch.tensor([INF, NAN])
    with pytest.raises(McaError, match=r"^step 3: the model has parameters .*: a \(rank 0: nan\)\. Resume"):
        finite.require_finite_weights(3, [("a", both), ("b", torch.ones(1))])
