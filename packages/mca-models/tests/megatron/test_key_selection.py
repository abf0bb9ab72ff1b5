"""Selection of keys and experts, and options of attention, one by one, without ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import XIELUActivation

from mca_models.megatron import platform
from mca_models.megatron.features.dsa import DsaIndexer, DsaSizes
from mca_models.megatron.features.mlp import Xielu
from mca_models.megatron.features.routers import BiasedTopK
from mca_models.megatron.layers.attention import AttentionOptions, CoreAttention


def test_an_indexer_chooses_the_highest_of_the_keys_before() -> None:
    torch.manual_seed(0)
    sizes = DsaSizes(heads=2, channels=4, hidden=8, compressed=6, topk=3, interleaved=False)
    indexer = DsaIndexer(sizes, torch.tensor([1.0]), 1.0, torch.float32)
    queries, keys, weights = torch.randn(5, 1, 2, 4), torch.randn(9, 1, 4), torch.randn(5, 1, 2)
    chosen = indexer.select(queries, weights, keys, 4)
    for row, place in enumerate(range(4, 9)):
        scores = [
            sum(
                float(weights[row, 0, head] * (queries[row, 0, head] @ keys[key, 0]).relu())
                for head in range(2)
            )
            for key in range(place + 1)
        ]
        picked = chosen[0, row].nonzero()[:, 0].tolist()  # of equal ones any
        assert sorted(scores[key] for key in picked) == pytest.approx(sorted(scores)[-3:])
    assert not list(indexer.parameters())  # it is not trained


@pytest.mark.parametrize("interleaved", [True, False])
def test_an_indexer_turns_pairs_by_their_place(interleaved: bool) -> None:
    sizes = DsaSizes(heads=1, channels=6, hidden=6, compressed=6, topk=3, interleaved=interleaved)
    indexer = DsaIndexer(sizes, torch.tensor([1.0, 0.1]), 2.0, torch.float32)
    x, places = torch.randn(3, 1, 1, 6), torch.tensor([0, 4, 7])
    turned = indexer._rotated(x, places)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), 2 * x[..., :4].norm(dim=-1))
    first, second = ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3))
    pairs = torch.view_as_complex(
        torch.stack([x[..., [first[0], second[0]]], x[..., [first[1], second[1]]]], -1)
    )
    angles = torch.polar(torch.full((3, 2), 2.0), torch.outer(places.float(), torch.tensor([1.0, 0.1])))
    expected = torch.view_as_real(pairs * angles[:, None, None])
    torch.testing.assert_close(turned[..., :2], expected[..., 0])
    torch.testing.assert_close(turned[..., 2:4], expected[..., 1])


def test_a_bias_chooses_experts_and_weighs_none() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    config = SimpleNamespace(moe_router_pre_softmax=False)
    router = SimpleNamespace(expert_bias=torch.tensor([-1.0, 0.0, 0.0, 1.0]), config=config)
    values, chosen = BiasedTopK(router).get_replay_topk(logits, 2)
    assert chosen.tolist() == [[3, 1]]
    assert values.tolist() == [[-1.0, 1.0]]


def test_chances_of_all_experts_meet_the_bias_as_they_are() -> None:
    chances = torch.tensor([[0.7, 0.2, 0.1]])
    config = SimpleNamespace(moe_router_pre_softmax=True)
    router = SimpleNamespace(expert_bias=torch.tensor([-0.3, 0.0, 0.0]), config=config)
    values, chosen = BiasedTopK(router).get_replay_topk(chances, 1)
    assert chosen.tolist() == [[0]]  # after another softmax it would be the second
    torch.testing.assert_close(values, torch.tensor([[0.7]]))


def attention(options: AttentionOptions, layer: int) -> Any:
    made = object.__new__(CoreAttention)
    torch.nn.Module.__init__(made)
    made.chunk = options.chunk if layer in options.chunked_layers else None
    made.temperature = options.temperature
    return made


def test_chunks_cut_what_queries_see() -> None:
    options = AttentionOptions(chunk=4, chunked_layers=frozenset({1}))
    assert list(attention(options, 0)._query_ranges(3, 10)) == [(0, 3, 10)]
    assert list(attention(options, 1)._query_ranges(3, 10)) == [(0, 3, 4), (4, 4, 8), (8, 8, 10)]


@pytest.mark.parametrize(("layers", "scaled"), [(None, [True, True]), (frozenset({1}), [False, True])])
def test_queries_grow_in_the_layers_that_have_a_temperature(layers: Any, scaled: list[bool]) -> None:
    platform.prepare()

    class Scaled(CoreAttention):
        options = AttentionOptions(temperature=(0.5, 4, 1), temperature_layers=layers)

    config: Any = SimpleNamespace(
        softmax_type="vanilla", attention_dropout=0.0, window_size=None, window_attn_skip_freq=None
    )
    mask: Any = SimpleNamespace(name="causal")
    made = [Scaled(config, number, mask, "self", pg_collection=SimpleNamespace(cp=None)) for number in (1, 2)]
    assert [each.temperature is not None for each in made] == scaled


def test_queries_grow_with_their_place() -> None:
    temperature_layers = attention(AttentionOptions(temperature=(0.5, 4, 1)), 0)._scale_by_temperature(
        torch.ones(6, 1, 1, 1), 2
    )
    steps = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 2.0])  # of places 3 to 8 in fours
    torch.testing.assert_close(temperature_layers.flatten(), 1 + 0.5 * torch.log1p(steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xielu_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    module = Xielu(SimpleNamespace(params_dtype=dtype))  # type: ignore[arg-type]
    assert {each.dtype for each in module.state_dict().values()} == {dtype}
    assert set(module.state_dict()) == {"alpha_p", "alpha_n", "beta", "eps"}


def test_xielu_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    region = "megatron.core.tensor_parallel.mappings.copy_to_tensor_model_parallel_region"
    monkeypatch.setattr(region, lambda weight: weight)
    theirs = XIELUActivation(alpha_p_init=0.6, alpha_n_init=0.9, dtype=torch.float32)
    mine = Xielu(SimpleNamespace(params_dtype=torch.float32))  # type: ignore[arg-type]
    mine.load_state_dict({name: value.reshape(1) for name, value in theirs.state_dict().items()})
    inputs = torch.tensor([-9.0, -1.0, -1e-7, 0.0, 1e-7, 0.5, 3.0])
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    (found, expected) = mine(x), theirs(y)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(mine.alpha_p.grad, theirs.alpha_p.grad)
    torch.testing.assert_close(mine.alpha_n.grad, theirs.alpha_n.grad)
