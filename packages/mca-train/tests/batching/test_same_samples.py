"""Errors of ranks with other samples than those of their replica."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.sample_consistency import (
    RANDOM,
    check_first_step,
    probe_checksum,
    require_same_samples,
)


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
    everyone(monkeypatch, [0, 5, 20, -1, -1], [1, 6, 20, -1, 7])
    assert list(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1")) == steps
    everyone(monkeypatch, [0, 5, 20, -1, 7], [1, 6, 19, -1, 7])
    with pytest.raises(
        McaError, match=r"^step 1: rank 0 has 20 samples, rank 1 has 19; sample i must be the same"
    ):
        next(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1"))
    everyone(monkeypatch, [0, 5, 20, -1, 7], [1, 6, 20, -1, 8])
    with pytest.raises(
        McaError, match=r"^step 1: ranks 0 and 1 have different samples, or the same in another"
    ):
        next(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1"))


def test_replicas_compare_samples_of_their_datasets_that_are_not_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"input_ids": [number, 1]} for number in range(5)]
    pairs = [{"chosen_input_ids": [1], "rejected_input_ids": [number]} for number in range(5)]
    probes = [probe_checksum(data, 5) for data in (rows, rows[::-1], pairs, pairs[::-1], [rows] * 5)]
    assert len({*probes}) == 5 and RANDOM not in probes
    for index in (0, 2, 4):
        changed = [*rows[:index], {"input_ids": [9, 1]}, *rows[index + 1 :]]
        assert probe_checksum(changed, 5) not in (probes[0], RANDOM)
    assert probe_checksum([{"text": "a collator makes its tokens"}] * 5, 5) == RANDOM
    assert probe_checksum(list(rows), 5) == probes[0]

    class Drawn:
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.randint(10**9, (3,)) + int(random.random() * 10**9)}

    before = torch.get_rng_state(), random.getstate()
    assert probe_checksum(Drawn(), 5) == RANDOM
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    sent: list[list[int]] = []
    monkeypatch.setattr(groups, "gather_numbers", lambda numbers, ranks: sent.append(numbers) or [numbers])
    steps: Any = [SimpleNamespace(checksum=5)]
    sampler: Any = SimpleNamespace(num_samples=5, seed=None)
    for replicas, dataset in ((2, rows), (1, rows), (2, None)):
        assert list(check_first_step(iter(steps), ranks(2, replicas), sampler, "step 1", dataset)) == steps
    assert [numbers[-1] for numbers in sent] == [probes[0], RANDOM, RANDOM]
    sent.clear()
    for seed in (None, 0, 7):
        sampler.seed = seed
        list(check_first_step(iter(steps), ranks(2, 2), sampler, "step 1"))
    assert sent == [[0, 5, 5, seed, RANDOM] for seed in (-1, 0, 7)]
