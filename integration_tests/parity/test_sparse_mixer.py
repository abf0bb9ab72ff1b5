"""Experts drawn in training: with the same draws gradients are transformers', and ranks draw as they should."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe import modeling_phimoe

from gradients import export_gradient, worst_errors
from harness import run_in_turn, run_ranks
from layouts import arguments, world_size
from mca_models.megatron.features import sparse_mixer
from parity import TOLERANCE
from reference import Reference, hf_model, make_reference

pytestmark = pytest.mark.ranks

CASE = "phimoe-noisy"


# what the generators give is not the same on two layouts, so both sides make up numbers from what they are drawn for
def exponential(like: Tensor) -> Tensor:
    return 0.05 + (3 * like.detach().nan_to_num(neginf=0.0)).sin().square()


def uniform(like: Tensor) -> Tensor:
    return (5 * like.detach()).sin().square()


def noise(like: Tensor, size: float) -> Tensor:
    return 1 + size * (2 * like.detach()).sin()


class Drawn:
    """Torch functions that transformers calls, with draws."""

    def __init__(self, like: Tensor) -> None:
        self.like = like

    def exponential_(self) -> Tensor:
        return exponential(self.like)

    def uniform_(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        if (low, high) == (0.0, 1.0):
            return uniform(self.like)
        return noise(self.like, (high - low) / 2)

    def __gt__(self, other: float) -> Tensor:
        return self.uniform_() > other


class Torch:
    """torch, whose draws are those above."""

    empty_like = staticmethod(lambda like, **_: Drawn(like))
    rand_like = staticmethod(Drawn)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def made_up() -> Iterator[None]:
    """A block in which both sides draw these numbers."""
    ours = {"exponential": exponential, "uniform": uniform, "noise": noise}
    with patch.object(modeling_phimoe, "torch", Torch()), patch.multiple(sparse_mixer, **ours):
        yield


def gradients(each: Reference, layout: str, folder: Path) -> None:
    """Runs on every rank."""
    with made_up():
        export_gradient(each, layout, folder)


def expected(each: Reference, folder: Path) -> None:
    """A checkpoint with the gradients of transformers' model in training in the place of weights."""
    model = copy.deepcopy(hf_model(CASE)).train()
    with made_up():
        logits = model(each.input_ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), each.input_ids[:, 1:].flatten())
        loss.backward()
    with torch.no_grad():
        assert float((logits - each.logits[:, :-1]).abs().max()) > 0.1  # it draws
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """With the expected gradients next to it."""
    each = make_reference(CASE, tmp_path_factory.mktemp("noisy"), batch=4)
    expected(each, each.path.parent / "expected")
    return each


@pytest.mark.cases(0, always=["tp1", "tp2ep2etp1"])
@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "ep2", "cp2", "pp2vpp2", "tp2ep2etp1", "dp2"])
def test_gradients_in_training_are_those_of_transformers(
    layout: str, noisy: Reference, tmp_path: Path
) -> None:
    run_ranks(world_size(layout), gradients, noisy, layout, tmp_path / "gradients")
    worst = worst_errors(noisy.path.parent / "expected", tmp_path / "gradients")
    assert worst[0][1] <= TOLERANCE, worst


@dataclass(frozen=True)
class Routed:
    """A pass of training on a rank.

    Args:
        drawn: The numbers by which its routers drew.
        experts: Which experts they drew for its tokens.
        gradient: Of the first router's weight.
    """

    drawn: list[Tensor]
    experts: list[Tensor]
    gradient: Tensor


def routed(each: Reference, layout: str, **settings: Any) -> Routed:
    """Runs on every rank."""
    from mca_models.megatron import AutoModel

    drawn: list[Tensor] = []

    def real(like: Tensor) -> Tensor:  # what other tests take in its place draws nothing
        drawn.append(torch.empty_like(like).exponential_())
        return drawn[-1]

    with patch.object(sparse_mixer, "exponential", real):
        model = AutoModel.from_pretrained(each.path, arguments(layout, **settings))
        found: list[Tensor] = []
        model.train()
        torch.manual_seed(5)
        for layer in model.chunks[0].decoder.layers:
            layer.mlp.router.register_forward_hook(lambda module, args, out: found.append(out[1].detach()))
        ids = each.input_ids[:1]
        places = torch.arange(ids.shape[1])[None]
        out = model.chunks[0](input_ids=ids, position_ids=places, attention_mask=None)
        out.float().square().sum().backward()
        return Routed(drawn, found, model.chunks[0].decoder.layers[0].mlp.router.weight.grad.clone())


def test_tensor_ranks_draw_for_their_own_tokens(tmp_path: Path) -> None:
    """Megatron trains experts on several tensor ranks with sequence parallelism only."""
    one, other = run_ranks(2, routed, make_reference(CASE, tmp_path), "tp2sp")
    assert one.drawn and not any(torch.equal(a, b) for a, b in zip(one.drawn, other.drawn, strict=True))


def test_what_is_computed_again_is_drawn_again_alike(tmp_path: Path) -> None:
    each = make_reference(CASE, tmp_path)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    calls = (partial(routed, each, "tp1"), partial(routed, each, "tp1", **again))
    (plain,), (twice,) = run_in_turn(1, *calls)
    first = twice.experts[: len(plain.experts)]
    assert all(torch.equal(a, b) for a, b in zip(plain.experts, first, strict=True))
    largest = float(plain.gradient.abs().max())
    torch.testing.assert_close(twice.gradient, plain.gradient, atol=1e-5 * largest, rtol=0)
