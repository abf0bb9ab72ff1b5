"""Given experts: which are accepted, and what each router's choice makes of them."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.features.router_replay import LIVE, ReplayableTopK, RoutedExperts
from mca_models.megatron.features.routers import BiasedTopK, GroupLimitedTopK, SigmoidTopK
from mca_models.megatron.features.sparse_mixer import SparseMixerTopK, sparse_mixer_topk

SHAPE = RoutedExperts(layers=(1, 3), num_layers=4, topk=2, num_experts=6)


def experts(*tokens: list[int]) -> Tensor:
    """Return experts of one token each, the same in both layers."""
    return torch.tensor(tokens)[:, None].expand(-1, 2, -1)


def test_layers_without_experts_are_left_out() -> None:
    every = torch.tensor([[[0, 0], [1, 5], [0, 0], [4, 2]]])
    checked = SHAPE.checked(every, "x")
    assert checked.tolist() == [[[1, 5], [4, 2]]]
    assert checked.dtype == torch.int16
    assert SHAPE.checked(every[:, [1, 3]], "x").tolist() == checked.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64])
def test_ids_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    assert SHAPE.checked(experts([5, 0]).to(dtype), "x").tolist() == [[[5, 0], [5, 0]]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(1, 3, 2).long(),
            "shape [1, 3, 2]; expected [..., layers, topk] with the 2 layers that have",
        ),
        (torch.zeros(2).long(), "shape [2]; expected"),
        (torch.zeros(1, 2, 3).long(), "has 3 experts per token and layer; the model routes to 2"),
        (experts([0, 6]), "has expert 6; expected 0 to 5, or -1"),
        (experts([0, 1], [-2, 3]), "has expert -2; expected 0 to 5"),
        (
            experts([0, 1], [3, 3]),
            "has [3, 3] as the experts of a token; expected 2 different ones, or only -1",
        ),
        (experts([LIVE, 3]), "has [-1, 3] as the experts of a token"),
        (experts([0, 1]).float(), "has dtype torch.float32; expected integers"),
    ],
)
def test_wrong_experts_are_one_error(given: Tensor, message: str) -> None:
    with pytest.raises(McaError, match="^routed_experts .*" + re.escape(message)):
        SHAPE.checked(given, "routed_experts")


def test_duplicates_are_found_at_every_distance() -> None:
    shape = RoutedExperts(layers=(0,), num_layers=1, topk=5, num_experts=9)
    for first in range(5):
        for second in range(first + 1, 5):
            given = torch.arange(5)
            given[second] = given[first]
            with pytest.raises(McaError, match="5 different ones"):
                shape.checked(given[None, None], "x")


def plain(scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
    return tuple(scores.topk(topk, dim=1))  # type: ignore[return-value]


ROUTER = SimpleNamespace(
    training=True,
    expert_bias=torch.tensor([0.0, 9.0, 0.0, 0.0]),
    config=SimpleNamespace(moe_router_pre_softmax=True),
)
CHOICES: dict[str, Any] = {
    "plain": ReplayableTopK,
    "biased": lambda: BiasedTopK(ROUTER),
    "groups": lambda: GroupLimitedTopK(2, 1, 1),
    "sigmoid": SigmoidTopK,
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_router_takes_given_experts_and_their_live_scores(name: str) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    choice = CHOICES[name]()
    _, own = choice.get_replay_topk(scores, 2, None, None, plain)
    choice.given, choice.waiting = torch.tensor([[3, 0], [LIVE, LIVE]]), True
    values, chosen = choice.get_replay_topk(scores, 2, None, None, plain)
    assert chosen.tolist() == [[3, 0], own[1].tolist()]
    assert torch.equal(values[0], scores[0, [3, 0]])
    assert not choice.waiting
    values[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == [1, 0, 0, 1]
    if name == "sigmoid":
        assert torch.equal(choice.total, values.sum(-1, keepdim=True))


def test_given_experts_of_another_number_of_tokens_are_an_error() -> None:
    choice = ReplayableTopK(layer_number=7, given=torch.tensor([[3, 0]]))
    with pytest.raises(RuntimeError, match="layer 7"):
        choice.get_replay_topk(torch.rand(2, 4), 2, None, None, plain)


def test_sparse_mixer_weighs_given_experts_as_in_evaluation() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 4, generator=generator)
    weights, own = sparse_mixer_topk(logits, 0.5, draws=False)
    choice = SparseMixerTopK(ROUTER, 0.5, given=own)
    choice.logits = logits
    values, chosen = choice.get_replay_topk(logits.softmax(-1), 2)
    assert torch.equal(chosen, own)
    assert torch.equal(values, weights)
    turned = own.flip(-1)
    choice.given = turned
    values, chosen = choice.get_replay_topk(logits.softmax(-1), 2)
    assert torch.equal(chosen, turned)
    highest = logits.gather(-1, own[:, :1])
    gates = logits.masked_fill(
        (highest - logits) / logits.abs().clamp(min=highest) > 1.0, -torch.inf
    ).softmax(-1)
    assert torch.equal(values[:, :1], gates.gather(-1, turned[:, :1]))


@pytest.mark.parametrize(
    "wrong",
    [torch.iinfo(dtype).max for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)] + [2**32 + 1],
)
def test_an_id_of_any_size_is_wrong_by_its_value(wrong: int) -> None:
    with pytest.raises(McaError, match=f"^x has expert {wrong}; expected 0 to 5"):
        SHAPE.checked(experts([0, wrong]), "x")
