"""Errors of ranks with other samples than those of their replica."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.sample_consistency import check_first_step, require_same_samples


def ranks(world_size: int, replicas: int) -> Any:
    return SimpleNamespace(world_size=world_size, data_parallel_size=replicas, data_parallel_rank=0)


def everyone(monkeypatch: pytest.MonkeyPatch, *table: list[int]) -> None:
    monkeypatch.setattr(groups, "gather_numbers", lambda numbers, ranks: list(table))


def test_replicas_have_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone(monkeypatch, [0, 5], [1, 6], [0, 5], [1, 6])
    require_same_samples(ranks(4, 2), 5, "steps 1 to 9")
    everyone(monkeypatch, [0, 5], [1, 6], [0, 5], [1, 7])
    with pytest.raises(McaError, match=r"^steps 1 to 9: ranks 1 and 3, of one replica, have "):
        require_same_samples(ranks(4, 2), 5, "steps 1 to 9")
    require_same_samples(ranks(4, 4), 5, "steps 1 to 9")  # each has its own, and nobody is asked


def test_replicas_sample_from_as_many_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Any = [SimpleNamespace(checksum=5), SimpleNamespace(checksum=6)]
    sampler: Any = SimpleNamespace(num_samples=20, seed=None)
    everyone(monkeypatch, [0, 5, 20, -1], [1, 6, 20, -1])
    assert list(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1")) == steps
    everyone(monkeypatch, [0, 5, 20, -1], [1, 6, 19, -1])
    with pytest.raises(
        McaError, match=r"^step 1: rank 0 has 20 samples, rank 1 has 19; sample i must be the same"
    ):
        next(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1"))
