"""What is counted for the biases of experts."""

from types import SimpleNamespace

import pytest
import torch

from mca_train.losses import moe_aux

SENT = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("segments", "counted"),
    [([0, 0, 1, 1, 2], [3, 4, 3]), ([0, 0, -1, 1, -1], [2, 2, 2]), ([-1] * 5, [0, 0, 0])],
)
def test_experts_biases_move_by_tokens_and_not_by_padding(segments, counted):
    """Padding is one token many times, which would decide where the bias of its experts goes."""
    balance = SimpleNamespace(segments=torch.tensor(segments))
    router = SimpleNamespace(
        enable_expert_bias=True, mca_balance=balance, local_tokens_per_expert=torch.zeros(3)
    )
    with torch.no_grad():
        moe_aux._count_for_bias(router, SENT)
    assert router.local_tokens_per_expert.tolist() == [0, 0, 0], "in an evaluation nothing is counted"
    moe_aux._count_for_bias(router, SENT, padding_mask=torch.zeros(5, dtype=torch.bool))
    assert router.local_tokens_per_expert.tolist() == counted
