"""Names of tensors that are not finite."""

import pytest
import torch

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
