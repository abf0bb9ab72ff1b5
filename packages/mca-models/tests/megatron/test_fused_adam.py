"""Our fused Adam makes the updates of torch's AdamW and Adam, with the fused optimizers' state layout."""

import pytest
import torch

from mca_models.megatron.platform import FusedAdam


@pytest.mark.parametrize("decoupled", [True, False])
def test_matches_torch(decoupled: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 3)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ours = FusedAdam([mine], lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(10):
        gradient = torch.randn(5, 3)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs)


def test_step_lives_in_the_group() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
