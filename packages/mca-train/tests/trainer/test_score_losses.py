"""Losses and metrics of reward models and classifiers, from the outputs of all tokens, against sums by hand."""

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train import groups
from mca_train.trainer import scores
from mca_train.trainer.scores import ClassificationTrainer, RewardTrainer, sequence_scores


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "sum_over_context", lambda total: total)
    monkeypatch.setattr(scores, "sequence_loss", lambda losses, real, ranks: (losses, real))


def trainer(ranks: int = 1, **more: Any) -> Any:
    added: list[Any] = []
    metrics = SimpleNamespace(
        add=lambda *both: added.append(both), add_extremes=lambda *both: added.append(both)
    )
    made: Any = SimpleNamespace(
        metrics=metrics, added=added, ranks=SimpleNamespace(layout=SimpleNamespace(cp=ranks)), **more
    )
    made._add_means = lambda *both: RewardTrainer._add_means(made, *both)
    return made


def batch(remaining: list[list[int]], segments: list[list[int]], count: int, values: Any = None) -> Any:
    return SimpleNamespace(
        tokens_remaining=torch.tensor(remaining),
        segments=torch.tensor(segments),
        num_segments=count,
        values=None if values is None else torch.tensor(values, dtype=torch.float64),
    )


def test_the_score_of_a_sequence_is_that_of_its_last_token(one_rank: None) -> None:
    """A pack of three sequences, of which the second does not count, and padding of the first."""
    output = torch.arange(14, dtype=torch.bfloat16).view(1, 7, 2)
    packed = batch([[1, 0, -1, -2, 2, 1, 0]], [[0, 0, 0, 1, 2, 2, 2]], 4)
    found, real = sequence_scores(output, packed)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2, 3], [0, 0], [12, 13], [0, 0]]
    assert real.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("margins", [False, True])
def test_a_reward_model_learns_from_whole_pairs(one_rank: None, margins: bool, ranks: int) -> None:
    """Two pairs, one that fills the batch up, and an empty sequence at the end of the pack."""
    rewards = [2.0, 0.5, -1.0, 1.0, 7.0, 9.0, 0.0]
    values = [[1.0], [9.0], [0.25], [9.0], [9.0], [9.0], [9.0]] if margins else None
    made = batch([[0, 0, 0, 0, 0, -1, -1]], [[0, 1, 2, 3, 4, 5, 6]], 7, values)
    each = trainer(ranks, _centering=0.125)
    output = torch.tensor(rewards).view(1, 7, 1)
    losses, real = RewardTrainer.compute_loss(each, output, made)
    first, second = (1.5 - 1.0, -2.0 - 0.25) if margins else (1.5, -2.0)
    expected = [log(1 + exp(-first)) + 0.125 * 2.5**2, log(1 + exp(-second))]
    assert losses[:2].tolist() == pytest.approx(expected, rel=1e-6)
    assert real.tolist() == [1, 1, 0], "a pair with one answer does not count"
    (sums, count), (extremes, counted) = each.added
    assert float(count) == 2 / ranks
    found = {name: float(value) * ranks for name, value in sums.items()}
    assert found == {"accuracy": 1, "margin": 1.5 - 2, "mean_reward": 1.25}
    assert extremes.tolist() == [[2, -1, 7], [0.5, 1, 0]]
    assert counted.tolist() == [[1, 1, 0]] * 2


@pytest.mark.parametrize(
    "kind,values,losses,metric",
    [
        ("single_label_classification", [[1.0], [0.0]], [log(1 + exp(2)), log(1 + exp(-1))], 1 / 2),
        (
            "multi_label_classification",
            [[1.0, 0.0], [0.0, 1.0]],
            [(log(1 + exp(-2)) + log(2)) / 2, (log(1 + exp(1)) + log(2)) / 2],
            1 / 2,
        ),
        ("regression", [[2.5, 1.0], [0.0, 0.0]], [(0.25 + 1) / 2, 1 / 2], (0.75 + 0.5) / 2),
    ],
)
def test_a_classifier_compares_scores_with_values(
    one_rank: None, kind: Any, values: Any, losses: list[float], metric: float
) -> None:
    """The first scores are 2 and 0, the second 1 and 0; a third sequence fills the batch up."""
    made = batch([[0, 0, -1]], [[0, 1, 2]], 3, [*values, values[0]])
    each = trainer(_problem_type=kind)
    output = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [5.0, 5.0]]])
    found, real = ClassificationTrainer.compute_loss(each, output, made)
    assert found[:2].tolist() == pytest.approx(losses, rel=1e-6)
    assert real.tolist() == [1, 1, 0]
    ((sums, count),) = each.added
    ((_, total),) = sums.items()
    assert float(total / count) == pytest.approx(metric)
    made.values = None
    with pytest.raises(McaError, match="has no 'values'"):
        ClassificationTrainer.compute_loss(each, output, made)
