"""Means over the pairs of a batch, of which some only fill it up."""

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train.losses.options import PAIR_METRICS
from mca_train.losses.preference import PairLogps
from mca_train.trainer import kto
from mca_train.trainer.dpo import DpoTrainer
from mca_train.trainer.kto import KtoTrainer
from mca_train.trainer.trainer import McaTrainer


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_that_fills_a_batch_up_counts_in_no_metric(ranks: int) -> None:
    added: list[Any] = []
    trainer: Any = SimpleNamespace(
        metric_names=PAIR_METRICS,
        metrics=SimpleNamespace(add=lambda sums, count: added.append((sums, float(count)))),
        ranks=SimpleNamespace(layout=SimpleNamespace(cp=ranks)),
    )
    trainer._add_means = partial(McaTrainer._add_means, trainer)
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


def test_an_answer_is_good_if_its_value_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, counts = torch.tensor([-4.0, -6.0, -8.0]), torch.tensor([2, 2, 0])
    monkeypatch.setattr(kto, "sequence_logps", lambda output, batch: (sums, counts))
    monkeypatch.setattr(kto, "sequence_loss", lambda losses, real, ranks: (losses, real))
    added: list[Any] = []
    trainer: Any = SimpleNamespace(
        _kl=torch.tensor(0.25),
        _reference_queue=deque([torch.tensor([-5.0, -9.0, -8.0])]),
        _add_metrics=lambda *values: added.extend(values[2:]),
        kto=lambda gain, good, kl: torch.where(good, gain, 10 * gain) + kl,
        ranks=None,
    )
    batch: Any = SimpleNamespace(values=torch.tensor([[1.0], [0.0], [0.0]]))
    losses, real = KtoTrainer.compute_loss(trainer, sums, batch)
    assert losses.tolist() == [1.25, 30.25, 0.25] and real.tolist() == [1, 1, 0]
    assert [each.tolist() for each in added] == [[1, 0, 0], [0, 1, 0]], "the last one fills the batch up"


@pytest.mark.parametrize("is_real", [(True, True), (True, False), (False, False)])
def test_the_divergence_is_the_mean_gain_of_other_samples_answers(
    is_real: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches of two sequences, of which the second may only fill the batch up."""
    policy = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -50.0])]
    reference = [torch.tensor([-2.0, -4.0]), torch.tensor([-3.5, -10.0])]
    real = [torch.tensor([is_real[0], is_real[0]]), torch.tensor([is_real[1], False])]
    monkeypatch.setattr(kto, "counted_sequences", lambda micro: real[micro])
    monkeypatch.setattr(kto.groups, "sum_over_data", lambda total: total)
    mismatched = object()
    batch: Any = SimpleNamespace(kl_batch=mismatched)

    def log_probs(sums: list[torch.Tensor], own: list[torch.Tensor]) -> Any:
        return SimpleNamespace(
            log_probs=lambda asked: [
                (each, number) for number, each in enumerate(sums if asked is mismatched else own)
            ]
        )

    own = [torch.tensor([7.0]), torch.tensor([8.0])]
    trainer: Any = SimpleNamespace(
        _policy=log_probs(policy, []),
        _reference=log_probs(reference, own),
        ranks=SimpleNamespace(device=torch.device("cpu")),
    )
    KtoTrainer.before_forward(trainer, batch)
    assert [*trainer._reference_queue] == own
    expected = {(True, True): (1 + 2 + 0.5) / 3, (True, False): 1.5, (False, False): 0.0}[is_real]
    assert float(trainer._kl) == pytest.approx(expected)
