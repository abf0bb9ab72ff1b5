"""Counts for expert biases, and the tokens within a limited capacity."""

from types import SimpleNamespace

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses import moe_aux
from mca_train.losses.moe_sequence_ids import pass_sequence_ids

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


def test_layers_are_not_walked_where_none_looks_further_ahead() -> None:
    """In each micro-batch: a chunk may have thousands of experts."""
    config = SimpleNamespace(num_moe_experts=8, mtp_num_layers=None, sequence_parallel=False)
    counted = torch.zeros(1, 4)
    batch = SimpleNamespace(segments_at_depth=lambda: counted)
    assert pass_sequence_ids(batch, SimpleNamespace(config=config, pre_process=True)) is counted
