"""Counts for expert biases, and the tokens within a limited capacity."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses import moe_aux
from mca_train.losses.moe_aux import pass_sequence_ids

SENT = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("segments", "trained", "counted"),
    [
        ([0, 0, 1, 1, 2], True, [3, 4, 3]),
        ([0, 0, -1, 1, -1], True, [2, 2, 2]),
        ([-1] * 5, True, [0, 0, 0]),
        ([0, 0, 1, 1, 2], False, [0, 0, 0]),
    ],
)
def test_biases_of_trained_experts_move_by_tokens_and_not_by_padding(segments, trained, counted):
    """Padding is one token many times, which would decide where the bias of its experts goes."""
    balance = SimpleNamespace(segments=torch.tensor(segments))
    weight = torch.zeros(3, 1, requires_grad=trained)
    router = SimpleNamespace(
        enable_expert_bias=True, weight=weight, mca_aux_loss=balance, local_tokens_per_expert=torch.zeros(3)
    )
    with torch.no_grad():
        moe_aux._count_for_bias(router, SENT)
    assert router.local_tokens_per_expert.tolist() == [0, 0, 0], "in an evaluation nothing is counted"
    moe_aux._count_for_bias(router, SENT, padding_mask=torch.zeros(5, dtype=torch.bool))
    assert router.local_tokens_per_expert.tolist() == counted


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("filled", [False, True])
def test_padding_takes_no_place_of_an_expert(policy: str, filled: bool) -> None:
    """Three of six tokens are padding, before the others and with the highest weights; an expert takes two."""
    platform.prepare()
    sent = torch.tensor([[True, False]] * 6)
    weights = torch.tensor([0.9, 0.1, 0.9, 0.3, 0.9, 0.2]).unsqueeze(-1) * sent
    config = SimpleNamespace(moe_token_drop_policy=policy, moe_pad_expert_input_to_capacity=filled)
    balance = SimpleNamespace(segments=torch.tensor([-1, 0, -1, 0, -1, 1]), capacity=0.6)
    router = SimpleNamespace(mca_aux_loss=balance, topk=1, config=config)
    left, kept = moe_aux._drop_over_capacity(router, weights, sent)
    taken = [3, 5] if policy == "probs" else [1, 3]
    assert kept[:, 0].nonzero().flatten().tolist() == taken
    assert torch.equal(left[:, 0], torch.where(kept[:, 0], weights[:, 0], 0.0))
    assert not left[:, 1].any() and kept[:, 1].any() == filled


def test_padding_alone_is_sent_to_experts() -> None:
    platform.prepare()
    config = SimpleNamespace(moe_token_drop_policy="probs", moe_pad_expert_input_to_capacity=False)
    balance = SimpleNamespace(segments=torch.full((5,), -1), capacity=0.6)
    router = SimpleNamespace(mca_aux_loss=balance, topk=2, config=config)
    _, kept = moe_aux._drop_over_capacity(router, SENT.float(), SENT)
    assert kept.sum(0).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("segments", "training"), [([0, -1, 0, 1], True), ([0, -1, 0, 1], False), ([0] * 4, True)]
)
def test_tokens_are_distributed_evenly_without_padding(segments: list[int], training: bool) -> None:
    def above_mean(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits, logits > logits.mean(0)

    logits = torch.tensor([[1.0], [9.0], [2.0], [0.0]])
    balance = SimpleNamespace(segments=torch.tensor(segments))
    router = SimpleNamespace(mca_aux_loss=balance, training=training)
    weights, sent = moe_aux._sinkhorn(router, above_mean, logits)
    assert torch.equal(weights, logits)
    alone = training and -1 in segments  # the mean is 1 without padding, and 3 with it
    assert sent.flatten().tolist() == [False, True, alone, False]


def test_padding_alone_is_distributed_as_it_is() -> None:
    """Megatron's function divides by the number of tokens."""
    calls: list[int] = []

    def plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(logits))
        return logits, logits > 0

    balance = SimpleNamespace(segments=torch.full((2,), -1))
    router = SimpleNamespace(mca_aux_loss=balance, training=True)
    logits = torch.tensor([[1.0], [-1.0]])
    weights, sent = moe_aux._sinkhorn(router, plain, logits)
    assert weights is logits and sent.flatten().tolist() == [True, False] and calls == [2]


def test_layers_are_not_walked_where_none_looks_further_ahead() -> None:
    """In each micro-batch: a chunk may have thousands of experts."""
    config = SimpleNamespace(num_moe_experts=8, mtp_num_layers=None, sequence_parallel=False)
    counted = torch.zeros(1, 4)
    batch = SimpleNamespace(segments_at_depth=lambda: counted)
    assert pass_sequence_ids(batch, SimpleNamespace(config=config, pre_process=True)) is counted


def router(segments: list[int], **more: Any) -> Any:
    """Three experts, of which a token has two; losses are averaged over ten tokens."""
    state = moe_aux.AuxLossState(0, capacity=None)
    state.tokens, state.items_per_token, state.num_segments = 10.0, 0.5, 4
    state.segments = torch.tensor(segments)
    settings: dict[str, Any] = {"moe_z_loss_coeff": 0.1} | more
    return SimpleNamespace(
        num_experts=3, topk=2, mca_aux_loss=state, training=True, config=SimpleNamespace(**settings)
    )


def test_a_balancing_loss_is_one_where_experts_have_equal_loads() -> None:
    """Sum over experts of: mean score, times the share of choices, times the number of experts."""
    scores = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]])
    equal = moe_aux._balance(router([0, 1]), scores, torch.tensor([4, 4, 4]))
    assert float(equal) == pytest.approx(2.0, rel=1e-6), "two tokens"
    load = torch.tensor([6, 2, 4])
    share = [6 * 3 / 12, 2 * 3 / 12, 4 * 3 / 12]
    by_hand = (0.5 + 0.125) * share[0] + 0.75 * share[1] + 0.625 * share[2]
    assert float(moe_aux._balance(router([0, 1]), scores, load)) == pytest.approx(by_hand, rel=1e-6)
    loads = torch.tensor([[4, 4, 4], [6, 2, 4], [0, 0, 0]])
    of_second = 0.125 * share[0] + 0.5 * share[1] + 0.375 * share[2]
    found = moe_aux._balance(router([0, 1]), scores, loads, torch.tensor([0, 1]))
    assert float(found) == pytest.approx(1 + of_second, rel=1e-6)
    assert float(moe_aux._balance(router([0, 1]), scores, torch.zeros(3))) == 0
    few = moe_aux._balance(router([0, 1]), scores, torch.tensor([1, 0, 0]))
    assert float(few) == pytest.approx(0.625 * 1.5, rel=1e-6), "a sequence has at least one token"


def test_hugging_faces_balancing_loss_takes_the_softmax_without_padding() -> None:
    each = router([0, -1], **{moe_aux.HF_AUX_LOSS: True})
    each.mca_aux_loss.logits = torch.tensor([[1.0, 2.0, 4.0], [9.0, 9.0, 9.0]], dtype=torch.bfloat16)
    found = moe_aux._balance(each, torch.full((2, 3), 7.0), torch.tensor([6, 2, 4]))
    expected = torch.tensor([1.0, 2.0, 4.0]).softmax(0) @ torch.tensor([1.5, 0.5, 1.0])
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_the_z_loss_squares_the_log_sum_of_real_tokens() -> None:
    platform.prepare()
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    each, logits = router([0, -1, 1]), torch.tensor([[0.0, 1.0], [5.0, 5.0], [2.0, 0.0]], requires_grad=True)
    result = moe_aux._z_loss(each, logits)
    by_hand = sum(math.log(math.exp(a) + math.exp(b)) ** 2 for a, b in ((0, 1), (2, 0)))
    assert float(each.mca_aux_loss.losses["z_loss"]) == pytest.approx(by_hand / 10, rel=1e-6)
    assert torch.equal(result, logits)
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    squares = torch.logsumexp(logits, -1).square()[[0, 2]].sum() * 0.1 * 0.5
    (own,) = torch.autograd.grad(squares, logits)
    torch.testing.assert_close(gradient, 1 + own)
    moe_aux._z_loss(each, logits)
    assert float(each.mca_aux_loss.losses["z_loss"]) == pytest.approx(by_hand / 5, rel=1e-6), "added up"
    each.training = False
    assert moe_aux._z_loss(each, logits) is logits
    assert moe_aux._z_loss(router([0, 0, 0], moe_z_loss_coeff=None), logits) is logits


def test_a_router_gets_the_padding_and_counts_its_load() -> None:
    platform.prepare()
    each, logits = router([]), torch.tensor([[[3.0, 2.0, 1.0]], [[1.0, 3.0, 2.0]], [[3.0, 1.0, 2.0]]])
    each.score_function, each.config.moe_router_fusion = "softmax", False
    seen: list[Any] = []

    def plain(given: torch.Tensor, padding: torch.Tensor | None) -> str:
        seen.append((each.mca_aux_loss.logits.tolist(), padding))
        return "routed"

    mask = torch.tensor([[False], [False], [True]])
    assert moe_aux._route(each, plain, logits, mask) == "routed"
    assert each.mca_aux_loss.segments.tolist() == [0, 0, -1]
    assert seen[0][0] == logits.flatten(0, 1).tolist() and torch.equal(seen[0][1], mask)
    assert each.mca_aux_loss.logits is None
    each.mca_aux_loss.counting, each.mca_aux_loss.load = True, torch.zeros(3)
    moe_aux._route(each, plain, logits, mask)
    assert each.mca_aux_loss.load.tolist() == [1, 2, 1]
    moe_aux._route(each, plain, logits)
    assert each.mca_aux_loss.load.tolist() == [3, 4, 3] and seen[-1][1] is None
    each.mca_aux_loss.capacity, each.mca_aux_loss.counting = 0.0, False
    each.config.moe_token_drop_policy, each.config.moe_pad_expert_input_to_capacity = "probs", False
    some = torch.tensor([[True, True, False]] * 3)
    weights, kept = moe_aux._route(each, lambda *_: (some.float(), some), logits)
    assert kept.shape == (3, 3) and not kept.any() and not weights.any(), "no expert takes a token"


@pytest.mark.parametrize("capacity", [None, 0.0, 1.5])
def test_routers_get_their_losses_once_and_drop_tokens_themselves(
    capacity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second router is that of an MTP layer; a chunk without routers is left as it is."""
    config = SimpleNamespace(moe_expert_capacity_factor=capacity)
    made: list[Any] = [
        SimpleNamespace(config=config, routing="plain", sinkhorn_load_balancing="even", number=number)
        for number in range(2)
    ]
    chunks: list[Any] = ["without", "with"]
    prepared: list[str] = []
    monkeypatch.setattr(moe_aux, "routers", lambda own: made if own == ("with",) else [])
    monkeypatch.setattr(moe_aux, "propagate_sequence_ids", prepared.append)

    class ByIdentity(dict[Any, int]):
        def get(self, router: Any, default: int = 0) -> int:  # type: ignore[override]
            return 2 if router.number == 1 else default

    monkeypatch.setattr(moe_aux, "mtp_router_depths", lambda chunk: ByIdentity())
    moe_aux.install_aux_losses(chunks)
    assert prepared == ["with"]
    assert [(each.mca_aux_loss.depth, each.mca_aux_loss.capacity) for each in made] == [
        (0, capacity),
        (2, capacity),
    ]
    for each in made:
        assert each.config.moe_expert_capacity_factor is None
        assert (each.config is config) == (capacity is None), "other layers have the same configuration"
        assert each.routing.args == (each, "plain") and each.sinkhorn_load_balancing.args == (each, "even")
        assert each.routing.func is moe_aux._route and each.apply_z_loss.func is moe_aux._z_loss
        assert each._apply_aux_loss.args == ("aux_loss", each)
    assert config.moe_expert_capacity_factor == capacity
    first = made[0].mca_aux_loss
    moe_aux.install_aux_losses(chunks)
    assert made[0].mca_aux_loss is first and prepared == ["with"]
    made[:] = [SimpleNamespace(config=config, routing="plain", sinkhorn_load_balancing="even", number=0)]
    for _ in range(2):
        moe_aux.install_aux_losses(chunks)
    assert prepared == ["with", "with"], "one router is enough"


KINDS = {
    "aux_loss": ("load_balancing_loss", "tp and cp"),
    "seq_aux_loss": ("seq_load_balancing_loss", "tp and cp"),
    "global_aux_loss": ("global_load_balancing_loss", "tp, dp and cp"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_balancing_loss_is_of_the_tokens_of_its_group(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences of one token each and padding; another rank has the same tokens."""
    platform.prepare()
    loss, (name, group) = moe_aux._ROUTER_METHODS[f"_apply_{kind}"], KINDS[kind]
    summed: list[Any] = []
    monkeypatch.setattr(
        moe_aux.groups, "sum_over", lambda own, group: summed.append((own.tolist(), group)) or 2 * own
    )
    each = router([0, 1, -1], **{moe_aux.HF_AUX_LOSS: False})
    each.tp_cp_group, each.tp_dp_cp_group = "tp and cp", "tp, dp and cp"
    sent = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    scores = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375], [0.0, 0.0, 0.0]])
    probs = torch.zeros(3, 3, requires_grad=True)
    coefficients = {kind: 0.0}
    each.get_aux_loss_coeff = coefficients.__getitem__
    assert loss(each, probs, scores, sent) is probs and not summed and not each.mca_aux_loss.losses
    coefficients[kind] = 0.5
    found = loss(each, probs, scores, sent, with_padding_mask=True)
    assert found is not probs and torch.equal(found, probs)
    by_sequence = [[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert summed == [(by_sequence if kind == "seq_aux_loss" else [2, 1, 1], group)]
    if kind == "seq_aux_loss":
        value = (0.5 + 0.25) * 1.5 + (0.125 + 0.375) * 1.5
    else:
        value = 0.625 * 1.5 + 0.75 * 0.75 + 0.625 * 0.75
    assert {key: float(value) for key, value in each.mca_aux_loss.losses.items()} == {
        name: pytest.approx(value / 10)
    }
    if kind == "global_aux_loss":
        each.mca_aux_loss.load = torch.tensor([0.0, 4.0, 0.0])
        loss(each, probs, scores, sent)
        more = 0.75 * 3 * 4 / 4
        assert (
            float(each.mca_aux_loss.losses[name]) == pytest.approx((value + more) / 10) and len(summed) == 1
        )


@pytest.mark.parametrize("fails", [False, True])
def test_the_load_is_that_of_the_passes_on_all_ranks(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    both: list[Any] = [router([0]), router([0])]
    for number, each in enumerate(both):
        each.weight, each.tp_dp_cp_group = torch.zeros(1), f"group {number}"
        each.mca_aux_loss.load = torch.ones(3)
    monkeypatch.setattr(moe_aux, "routers", lambda chunks: iter(both))
    monkeypatch.setattr(moe_aux.groups, "sum_over", lambda own, group: own * (2 if group == "group 0" else 3))

    def forward() -> None:
        assert not torch.is_grad_enabled() and all(each.mca_aux_loss.counting for each in both)
        if fails:
            raise KeyError
        both[0].mca_aux_loss.load += torch.tensor([1.0, 2.0, 0.0])
        both[1].mca_aux_loss.load += torch.tensor([0.0, 1.0, 1.0])

    if fails:
        with pytest.raises(KeyError):
            moe_aux.count_expert_load([], forward)
    else:
        moe_aux.count_expert_load([], forward)
        assert [each.mca_aux_loss.load.tolist() for each in both] == [[2, 4, 0], [0, 3, 3]]
    assert not any(each.mca_aux_loss.counting for each in both)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_counts_of_a_step_without_targets_are_dropped(
    has_bias: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = SimpleNamespace(enable_expert_bias=has_bias, local_tokens_per_expert=torch.tensor([3.0, 5.0]))
    monkeypatch.setattr(moe_aux, "routers", lambda chunks: [each])
    moe_aux.mask_expert_counts([], torch.tensor(kept))
    assert each.local_tokens_per_expert.tolist() == ([0, 0] if has_bias and not kept else [3, 5])
    other: Any = SimpleNamespace(enable_expert_bias=False)
    moe_aux._count_for_bias(other, SENT)


def test_losses_outside_of_a_call_of_their_router_are_errors_of_ours() -> None:
    each = router([0, 1], **{moe_aux.HF_AUX_LOSS: True})
    with pytest.raises(RuntimeError, match="balancing loss outside of a router call"):
        moe_aux._balance(each, torch.zeros(2, 3), torch.zeros(3))
    each.mca_aux_loss.segments = None
    with pytest.raises(RuntimeError, match="router loss outside of a router call"):
        moe_aux._sequence_ids(each.mca_aux_loss)
    logits = torch.zeros(2, 2)
    each.mca_aux_loss.segments = torch.tensor([0, 1])
    with torch.no_grad():
        assert moe_aux._z_loss(each, logits) is logits
