"""Our fused Adam makes the updates of torch's AdamW and Adam, with the fused optimizers' state layout."""

import pytest
import torch

from mca_models.megatron.platform import FusedAdam, fused_adam

SHAPES = ((5, 3), (7,), (2, 2, 2))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("elements", [2**24, 8], ids=["together", "in-groups"])
def test_matches_torch(decoupled: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adam, "_ELEMENTS", elements)
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in SHAPES]
    mine, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    idle = torch.nn.Parameter(torch.ones(2))  # has no gradient
    ours = FusedAdam([*mine, idle], lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=0.01, weight_decay=0.1)
    for _ in range(10):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs)
    assert idle.tolist() == [1.0, 1.0]


def test_parameters_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(30)]
    for param in params:
        param.grad = torch.ones(4)
    launched: list[int] = []
    kernel = torch._foreach_lerp_
    monkeypatch.setattr(
        torch, "_foreach_lerp_", lambda xs, *rest: (launched.append(len(xs)), kernel(xs, *rest))
    )
    FusedAdam(params).step()
    assert launched == [30]


def test_step_lives_in_the_group() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}


def test_a_parameter_is_measured_once_a_step() -> None:
    asked: list[int] = []

    class Counted:
        def __init__(self, size: int) -> None:
            self.size = size

        def numel(self) -> int:
            asked.append(self.size)
            return self.size

    sizes = [1, 2**24, 1, 2, 2**24 - 3, 1]
    groups = [
        [each.size for each in group] for group in fused_adam._launch_groups([Counted(x) for x in sizes])
    ]
    assert groups == [[1], [2**24], [1, 2, 2**24 - 3], [1]]
    assert asked == sizes
