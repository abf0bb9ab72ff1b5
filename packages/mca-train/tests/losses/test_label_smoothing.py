"""Smoothed labels over a vocabulary that two tensor-parallel ranks share, with padding, against the definition."""

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses.loss_inputs import target_over_mean


@pytest.mark.parametrize("vocab_size", [4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_targets_logit_exceeds_the_mean_of_all(
    vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    from megatron.core import parallel_state, tensor_parallel

    monkeypatch.setattr(tensor_parallel, "reduce_from_tensor_model_parallel_region", lambda share: share)
    torch.manual_seed(1)
    logits = (torch.randn(3, 2, 8) * 4).to(dtype).requires_grad_()
    labels = torch.tensor([[0, vocab_size - 1], [3, 2], [vocab_size - 1, 1]])
    shares = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        shares.append(target_over_mean(logits[..., 4 * rank : 4 * rank + 4], labels, vocab_size))
    own = logits.detach().float().requires_grad_()
    expected = own.gather(-1, labels[..., None]).squeeze(-1) - own[..., :vocab_size].mean(-1)
    assert shares[0].dtype == torch.float32
    torch.testing.assert_close(shares[0] + shares[1], expected, rtol=1e-6, atol=1e-6)  # sums in another order
    weights = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.25, 1.0]])
    (found,) = torch.autograd.grad(((shares[0] + shares[1]) * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), own)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, wanted.to(dtype), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
    )
