"""What a loss of one's own may return."""

import torch

from mca_train.losses.token_loss import require_sums


def test_a_view_is_copied_and_keeps_its_gradient() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    sums = weight * 5
    loss, number = require_sums((sums[0], torch.tensor(1)), "Own")
    assert loss._base is None, "Megatron asserts so before it frees what a stage gives"
    assert number == 1
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [5.0, 0.0]


def test_another_tensor_is_taken_as_it_is() -> None:
    loss = torch.tensor(1.0)
    assert require_sums((loss, torch.tensor(1)), "Own")[0] is loss
