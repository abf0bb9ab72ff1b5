"""SparseMixer chooses, weighs and has gradients as transformers' function with the same draws."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe import modeling_phimoe

from mca_models.megatron.features import sparse_mixer
from mca_models.megatron.features.sparse_mixer import SparseMixerTopK, sparse_mixer_topk


@pytest.fixture
def same_draws() -> Iterator[None]:
    """Both sides draw the same numbers in the same order."""
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))

    def exponential(like: Tensor) -> Tensor:
        return torch.empty_like(like).exponential_(generator=ours)

    def uniform(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=ours)

    class Drawn:
        """Values that `rand_like` returns, which transformers may draw again."""

        def __init__(self, values: Tensor) -> None:
            self.values = values

        def uniform_(self) -> Tensor:
            return self.values

        def __gt__(self, other: float) -> Tensor:
            return self.values > other

    class Torch:
        """torch with those draws."""

        @staticmethod
        def empty_like(like: Tensor, **_: object) -> Any:
            return SimpleNamespace(
                exponential_=lambda: torch.empty(like.shape).exponential_(generator=theirs)
            )

        @staticmethod
        def rand_like(like: Tensor) -> Drawn:
            return Drawn(torch.rand(like.shape, generator=theirs))

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with (
        patch.object(sparse_mixer, "exponential", exponential),
        patch.object(sparse_mixer, "uniform", uniform),
        patch.object(modeling_phimoe, "torch", Torch()),
    ):
        yield


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("jitter", [0.01, 0.3, 2.0])
@pytest.mark.usefixtures("same_draws")
def test_it_is_transformers(jitter: float, *, training: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, 6, requires_grad=True)
    again = logits.detach().clone().requires_grad_()
    weights, chosen = sparse_mixer_topk(logits, jitter, draws=training)
    expected, experts = modeling_phimoe.sparsemixer(again, jitter, training)
    assert torch.equal(chosen, experts)
    torch.testing.assert_close(weights, expected, atol=1e-7, rtol=1e-6)
    upstream = torch.randn(500, 2)
    (weights * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, again.grad, atol=1e-7, rtol=1e-5)
    assert torch.equal(chosen, logits.topk(2).indices) != training


def test_noise_is_within_its_size_of_one_on_both_sides() -> None:
    torch.manual_seed(0)
    drawn = sparse_mixer.noise(torch.zeros(999), 0.25)
    assert 0.75 <= drawn.min() < 0.8 and 1.2 < drawn.max() <= 1.25


def test_a_router_draws_only_while_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests of whole models, which may share this process, let nothing be drawn
    monkeypatch.setattr(sparse_mixer, "exponential", lambda like: torch.empty_like(like).exponential_())
    logits = torch.randn(400, 6)
    chances = logits.softmax(-1).requires_grad_()
    found = {}
    for training in (False, True):
        choice = SparseMixerTopK(SimpleNamespace(training=training), 0.5)
        choice.logits = logits
        weights, found[training] = choice.get_replay_topk(chances, 2)
        assert weights.requires_grad  # by the chances, of which the z-loss is
    assert torch.equal(found[False], logits.topk(2).indices)
    assert not torch.equal(found[True], found[False])
