"""The two sums of a loss: of a trainer's own function, and of sequences that context ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.losses import loss_inputs
from mca_train.losses.token_loss import require_sums, sequence_loss


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_loss_of_sequences_is_counted_once_and_has_the_whole_gradient_on_each_context_rank(
    rank: int,
) -> None:
    ranks = SimpleNamespace(layout=SimpleNamespace(cp=3), context_parallel_rank=rank)
    losses = torch.tensor([3.0, 5.0, 7.0, 100.0], requires_grad=True)
    total, number = sequence_loss(losses, torch.tensor([1.0, 1.0, 1.0, 0.0]), ranks)
    assert float(total.detach()) * 3 == 15, "the sum over context ranks is that of the sequences that count"
    assert int(number) == (3 if rank == 0 else 0)
    total.backward()
    assert losses.grad is not None and losses.grad.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_view_is_copied_and_keeps_its_gradient() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    sums = weight * 5
    loss, number = require_sums((sums[0], torch.tensor(1)), "Own")
    assert loss._base is None, "Megatron asserts so before it frees what a stage gives"
    assert number == 1
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [5.0, 0.0]


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    "result", [ONE, (ONE,), (ONE, 3), (3, ONE), [ONE, ONE], (ONE, ONE, ONE), torch.ones(2), None]
)
def test_a_loss_is_two_tensors(result: Any) -> None:
    with pytest.raises(McaError, match=r"^Own\.compute_loss returned .*; expected two tensors: the sum over"):
        require_sums(result, "Own")


def test_another_tensor_is_taken_as_it_is() -> None:
    loss = torch.tensor(1.0)
    assert require_sums((loss, torch.tensor(1)), "Own")[0] is loss


def test_smoothing_subtracts_the_mean_of_many_logits_in_fp32() -> None:
    torch.manual_seed(0)
    logits = 10 + torch.randn(2, 3, 1000)
    labels = torch.randint(990, (2, 3))
    found = loss_inputs._Share.apply(logits, labels, 990, 990)
    wide = logits[..., :990].double()
    expected = wide.gather(-1, labels[..., None]).squeeze(-1) - wide.mean(-1)
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=1e-4
    )  # fp32 sums of 990 numbers near 10
