"""Means over the pairs of a batch, of which some only fill it up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train.losses.options import PAIR_METRICS
from mca_train.losses.preference import PairLogps
from mca_train.trainer.dpo import DpoTrainer
from mca_train.trainer.kto import KtoTrainer


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_that_fills_a_batch_up_counts_in_no_metric(ranks: int) -> None:
    added: list[Any] = []
    trainer: Any = SimpleNamespace(
        metric_names=PAIR_METRICS,
        metrics=SimpleNamespace(add=lambda sums, count: added.append((sums, float(count)))),
        ranks=SimpleNamespace(layout=SimpleNamespace(cp=ranks)),
    )
    policy = PairLogps(torch.tensor([-4.0, -6.0, 100.0]), torch.tensor([-8.0, -2.0, 50.0]))
    rewards = PairLogps(torch.tensor([1.0, 2.0, 100.0]), torch.tensor([0.5, 3.0, 50.0]))
    DpoTrainer._add_metrics(trainer, policy, rewards, torch.tensor([1.0, 1.0, 0.0]))
    ((sums, count),) = added
    assert count == 2 / ranks
    means = {name: float(value) / count for name, value in sums.items()}
    assert means == {
        "rewards/chosen": 1.5,
        "rewards/rejected": 1.75,
        "rewards/accuracies": 0.5,
        "rewards/margins": -0.25,
        "logps/chosen": -5.0,
        "logps/rejected": -5.0,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_good_and_bad_answers_have_separate_means_on_all_context_ranks(ranks: int) -> None:
    added: list[Any] = []
    trainer: Any = SimpleNamespace(
        _kl=torch.tensor(0.25),
        kto=SimpleNamespace(beta=0.5),
        metrics=SimpleNamespace(add=lambda *both: added.append(both)),
        ranks=SimpleNamespace(layout=SimpleNamespace(cp=ranks, tp=4)),
    )
    sums, gain = torch.tensor([-4.0, -6.0, -8.0, 100.0]), torch.tensor([1.0, 2.0, -3.0, 100.0])
    good, bad = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    KtoTrainer._add_metrics(trainer, sums, gain, good, bad)
    ((values, counts),) = added
    assert {name: float(count) * ranks for name, count in counts.items()} == {
        "kl": 1,
        **{f"{name}/chosen": 2 for name in ("rewards", "logps")},
        **{f"{name}/rejected": 1 for name in ("rewards", "logps")},
    }
    assert {name: float(value / counts[name]) for name, value in values.items()} == {
        "kl": 0.25,
        "rewards/chosen": 0.75,
        "rewards/rejected": -1.5,
        "logps/chosen": -5.0,
        "logps/rejected": -8.0,
    }
