"""New rows of the vocabulary are drawn around the mean of the old ones, for a bias on logits too."""

import torch

from mca_models.megatron.factory.vocabulary import VocabularyGrowth


def test_rows_and_a_bias_grow() -> None:
    mean, deviation = torch.tensor([3.0, 5.0]).double(), torch.tensor([0.0, 1.0]).double()
    growth = VocabularyGrowth(4, 104, 0, {"weight": (mean, deviation), "bias": (mean[1], deviation[1])})
    rows, bias = growth.rows("weight"), growth.rows("bias")
    assert rows.shape == (100, 2) and bias.shape == (100,)
    assert torch.equal(rows[:, 0], mean[:1].expand(100))
    assert abs(float(bias.mean()) - 5.0) < 1 and float(bias.std()) > 0
