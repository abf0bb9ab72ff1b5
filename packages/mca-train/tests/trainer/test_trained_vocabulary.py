"""Runs that train the embedding or the output layer, and those that do not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train.trainer import unused_options


@pytest.mark.parametrize(
    ("others", "trained", "expected"), [(False, True, True), (False, False, False), (True, False, True)]
)
def test_one_trained_row_of_the_vocabulary_on_any_rank_is_enough(
    others: bool, trained: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_options, "all_gather", lambda mine: [others, mine])
    params = [
        (SimpleNamespace(param=SimpleNamespace(vocab=vocab)), torch.ones(1, requires_grad=grad))
        for vocab, grad in ((False, True), (True, trained), (True, False))
    ]
    model: Any = SimpleNamespace(local_params=lambda: params)
    assert unused_options._trains_vocabulary(model) is expected
