"""The pieces of families' own layers, one by one, without ranks."""

from types import SimpleNamespace

import pytest
import tiny_hf
import torch

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features import settings
from mca_models.megatron.features.block import scaled_residual
from mca_models.megatron.features.delta_rule import CHUNK, gated_delta_rule
from mca_models.megatron.features.embedding import train_embedding_like_hf
from mca_models.megatron.features.features import active_features
from mca_models.megatron.features.mamba import state_space
from mca_models.megatron.features.moe import aux_loss_coefficient
from mca_models.megatron.features.routers import (
    GROUP_ROUTER,
    GroupLimitedTopK,
    best_group_mask,
    has_custom_groups,
)
from mca_models.templates import config_from_hf

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(length: int) -> Five:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, length)

    def random(*width: int) -> torch.Tensor:
        return torch.randn(*shape, *width, generator=generator, dtype=torch.float64)

    key = random(6)
    decay, beta = -random().abs(), random().sigmoid()
    return random(6), key / key.norm(dim=-1, keepdim=True), random(10), decay, beta


def token_by_token(*five: torch.Tensor) -> torch.Tensor:
    query, key, value, decay, beta = five
    state = torch.zeros(2, 3, 6, 10, dtype=torch.float64)
    outputs = []
    for t in range(query.shape[2]):
        state = state * decay[:, :, t, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, :, t])
        correction = beta[:, :, t, None] * (value[:, :, t] - known)
        state = state + key[:, :, t, :, None] * correction[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, :, t]))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 7])
def test_delta_rule_by_chunks_is_that_of_each_token(length: int) -> None:
    five = [x.requires_grad_() for x in inputs(length)]
    ours, theirs = gated_delta_rule(*five), token_by_token(*five)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), five)
    his = torch.autograd.grad((theirs * weight).sum(), five)
    for a, b in zip(mine, his, strict=True):
        torch.testing.assert_close(a, b)


def test_delta_rule_outputs_do_not_see_later_tokens() -> None:
    five = inputs(100)
    whole, cut = gated_delta_rule(*five), gated_delta_rule(*(x[:, :, :70] for x in five))
    torch.testing.assert_close(whole[:, :, :70], cut)


def test_delta_rule_is_computed_in_fp32() -> None:
    five = [x.bfloat16() for x in inputs(CHUNK + 1)]
    found = gated_delta_rule(*five)
    assert torch.equal(found, gated_delta_rule(*(x.float() for x in five)).bfloat16())


def test_strong_decay_does_not_overflow() -> None:
    query, key, value, decay, beta = (x.float() for x in inputs(CHUNK))
    assert gated_delta_rule(query, key, value, decay * 1000, beta).isfinite().all()


def states_token_by_token(*four: torch.Tensor) -> torch.Tensor:
    given, decay, into, read = four
    state = torch.zeros(2, 6, 4, 5, dtype=torch.float64)
    outputs = []
    for t in range(given.shape[2]):
        taken = torch.einsum("bgn,bgrp->bgrnp", into[:, :, t], given[:, :, t].unflatten(1, (3, 2)))
        state = state * decay[:, :, t, None, None].exp() + taken.flatten(1, 2)
        of_groups = torch.einsum("bgrnp,bgn->bgrp", state.unflatten(1, (3, 2)), read[:, :, t])
        outputs.append(of_groups.flatten(1, 2))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("length", [1, CHUNK, 3 * CHUNK - 7])
def test_state_space_by_chunks_is_that_of_each_token(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, length, 5), (2, 6, length), (2, 3, length, 4), (2, 3, length, 4)
    given, decay, into, read = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    four = [x.requires_grad_() for x in (given, -decay.abs() * 3, into, read)]
    ours, theirs = state_space(*four), states_token_by_token(*four)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), four)
    for a, b in zip(mine, torch.autograd.grad((theirs * weight).sum(), four), strict=True):
        torch.testing.assert_close(a, b)


def test_groups_are_kept_by_their_best_expert() -> None:
    scores = torch.tensor([[0.4, 0.0, 0.3, 0.3, 0.1, 0.2]])  # sums would keep the middle group
    assert best_group_mask(scores, 3, 1, best=1).tolist() == [[True, True, False, False, False, False]]
    assert best_group_mask(scores, 3, 2, best=1).tolist() == [[True, True, True, True, False, False]]
    assert best_group_mask(scores, 3, 1, best=2).tolist() == [[False, False, True, True, False, False]]
    assert best_group_mask(scores[None], 3, 1, best=2).tolist() == [
        [[False, False, True, True, False, False]]
    ]


def test_experts_of_other_groups_weigh_nothing_where_too_few_are_allowed() -> None:
    scores = torch.tensor([[0.4, 0.1, 0.3, 0.2]], requires_grad=True)
    values, chosen = GroupLimitedTopK(groups=2, group_topk=1, best=1).get_replay_topk(scores, 3)
    assert chosen[0, :2].tolist() == [0, 1]
    assert torch.equal(values, torch.tensor([[0.4, 0.1, 0.0]]))
    (gradient,) = torch.autograd.grad(values.sum(), scores)
    assert gradient.tolist() == [[1, 1, 0, 0]]


def test_residual_is_not_scaled_but_what_is_added() -> None:
    def add(training: bool, fused: bool) -> object:
        return lambda pair, residual, dropout: pair[0] + pair[1] + residual

    out = scaled_residual(add, 0.5)(True, False)(
        (torch.tensor(4.0), torch.tensor(2.0)), torch.tensor(1.0), 0.0
    )
    assert out.item() == 4.0


def config_of(case: str) -> McaModelConfig:
    model_type, different = tiny_hf.CASES[case]
    return config_from_hf({**tiny_hf.SIZE, "model_type": model_type, **different})


@pytest.mark.parametrize(("score", "best"), [("max", 1), ("top_sum", 2)])
@pytest.mark.parametrize(("group_topk", "groups_of_a_token"), [(None, 1), (2, 2)])
def test_a_router_has_the_groups_of_its_model(
    score: str, best: int, group_topk: int | None, groups_of_a_token: int
) -> None:
    class Router:
        router_replay: GroupLimitedTopK

    sizes = {"moe_router_num_groups": 2, "moe_router_group_topk": group_topk, "moe_router_group_score": score}
    router = GROUP_ROUTER.router(Router, config_of("deepseek_v2").replace_fields(**sizes))
    choice = router().router_replay
    assert (choice.groups, choice.group_topk, choice.best) == (2, groups_of_a_token, best)


@pytest.mark.parametrize(
    ("fields", "custom"),
    [
        ({}, False),
        ({"moe_router_num_groups": None, "moe_router_group_topk": None}, False),
        ({"moe_router_topk": 6}, True),
        ({"moe_router_topk": 5}, False),  # as Megatron divides: two experts of each group
        ({"moe_router_topk": 6, "moe_router_score_function": "softmax"}, False),
        ({"moe_router_group_score": "max"}, True),
        ({"moe_router_topk": 2, "moe_router_group_topk": None}, False),
        ({"moe_router_topk": 3, "moe_router_group_topk": None}, True),
    ],
)
def test_megatron_chooses_other_groups_if_it_sums_another_number_of_experts(
    fields: dict[str, object], custom: bool
) -> None:
    """The model sums the two best experts of a group; Megatron sums topk / group_topk of them."""
    plain = {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    plain |= {"moe_router_score_function": "sigmoid", "moe_router_group_score": "top_sum"}
    assert has_custom_groups(SimpleNamespace(moe=SimpleNamespace(**plain | fields))) == custom


def test_families_without_layers_of_their_own_have_no_other_features() -> None:
    common = {"attention", "layer norms", "MLP", "RoPE", "replay of routed experts", "training of embeddings"}
    for case in ("llama", "qwen3_moe", "glm4_moe"):
        config = config_of(case)
        names = {feature.name for feature in active_features(config)}
        assert names == common | ({"experts"} if config.moe else set()) | (
            {"MTP"} if config.mtp_num_layers else set()
        )


def test_megatrons_group_choice_is_off_where_ours_is_on() -> None:
    config = config_of("deepseek_v2")
    assert config.moe.moe_router_group_score == "max"
    assert settings(config)["moe_router_num_groups"] is None
    assert settings(config.replace_fields(moe_router_group_score="top_sum"))["moe_router_num_groups"] == 2


@pytest.mark.parametrize("row", [2, -1])
def test_a_models_own_dropout_leaves_embeddings_and_its_padding_row_gets_no_gradient(row: int) -> None:
    words = torch.nn.Embedding(5, 3)
    words.reduce_scatter_embeddings = False
    model = SimpleNamespace(
        embedding=SimpleNamespace(word_embeddings=words, embedding_dropout=torch.nn.Dropout(0.3))
    )
    config = config_of("llama").replace_fields(vocab_size=5, hidden_dropout=0.3, pad_token_id=row)
    train_embedding_like_hf(model, config)
    assert model.embedding.embedding_dropout.p == 0
    words(torch.tensor([[1, 2, 4, 2]])).sum().backward()
    theirs = torch.nn.Embedding(5, 3, padding_idx=row)
    theirs(torch.tensor([[1, 2, 4, 2]])).sum().backward()
    assert words.weight.grad is not None and theirs.weight.grad is not None
    assert torch.equal(words.weight.grad, theirs.weight.grad)
    train_embedding_like_hf(SimpleNamespace(), config)  # a chunk without an embedding


def test_embeddings_with_a_padding_row_are_in_one_piece_under_sequence_parallelism() -> None:
    words = torch.nn.Module()
    words.reduce_scatter_embeddings, words.tp_group = True, SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    words.forward = lambda ids: torch.ones(2, 3, 4)  # [seq / tp, batch, hidden] of ids [batch, seq]
    model = SimpleNamespace(embedding=SimpleNamespace(word_embeddings=words))
    train_embedding_like_hf(model, config_of("llama").replace_fields(pad_token_id=0))
    assert words(torch.arange(12).view(3, 4)).is_contiguous()  # a pipeline stage cannot send strides


def test_the_balancing_coefficient_counts_all_layers_together() -> None:
    config = config_of("qwen3_moe").replace_fields(moe_aux_loss_coeff=0.6, moe_layer_freq=(0, 1, 1, 1))
    assert aux_loss_coefficient(config) == pytest.approx(0.6 * 2 / 3)
    assert aux_loss_coefficient(config.replace_fields(moe_layer_freq=(0,) * 4)) == pytest.approx(1.2)
