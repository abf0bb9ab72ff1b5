"""Log-probabilities and entropies over a vocabulary sharded over threads, against torch's on all logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_ranks import SimulatedRanks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mca_config.errors import McaError
from mca_models.megatron.distributed import parallel
from mca_models.megatron.log_probs.vocabulary import TokenValues

TOKENS = torch.tensor([[0, 4, 5, 9], [10, 3, 7, 6]])


def truth(logits: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> Tensor:
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    values = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.stack([values, -(log_p.exp() * log_p).sum(-1)]) if entropy else values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("ranks", "vocab", "columns"),
    [(1, 11, 11), (1, 11, 13), (2, 11, 6), (3, 11, 5), (3, 11, 4), (4, 11, 6)],
)
def test_values_and_gradients_are_those_of_all_logits(
    ranks: int, vocab: int, columns: int, entropy: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``columns`` on each rank, of which the last are padding; exponentials of the logits overflow."""
    generator = torch.Generator().manual_seed(ranks)
    padded = (600 * torch.rand(*TOKENS.shape, ranks * columns, generator=generator)).to(dtype)
    whole = padded.detach().clone().requires_grad_(True)
    weights = torch.randn(2, *TOKENS.shape, generator=generator)
    weights = weights if entropy else weights[0]
    expected = truth(whole[..., :vocab], TOKENS, 3.0, entropy)
    (expected * weights).sum().backward()
    group = SimulatedRanks(ranks, monkeypatch)
    monkeypatch.setattr(parallel, "tensor_group", lambda: group)
    values = TokenValues(temperature=3.0, entropy=entropy)

    def compute(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own = padded[..., rank * columns : (rank + 1) * columns].clone().requires_grad_(True)
        before = own.detach().clone()
        found = values(own, TOKENS, vocab)
        (found * weights).sum().backward()
        with torch.no_grad():
            again = values(own, TOKENS, vocab)
        assert torch.equal(own.detach(), before) and own.grad is not None
        return found.detach(), again, own.grad

    gradients = []
    for result in group.run(compute):
        if isinstance(result, Exception):
            raise result
        found, again, gradient = result
        assert found.dtype == torch.float32 and found.shape == expected.shape and torch.equal(found, again)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
        assert gradient.dtype == dtype
        gradients.append(gradient)
    rounding = 1e-5 if dtype == torch.float32 else 2**-8  # of a gradient's last bit in bf16
    torch.testing.assert_close(torch.cat(gradients, -1), whole.grad, rtol=rounding, atol=rounding)


class Copies(TorchDispatchMode):
    """Memory of tensors of the size of the logits, all of which stay alive."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.kept = size, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self.size:
            self.kept.append(out)
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_without_gradients_there_are_no_more_copies_than_the_peak_has(
    entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(*TOKENS.shape, 11)
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(parallel, "tensor_group", lambda: alone)
    with torch.no_grad(), Copies(logits.numel()) as copies:
        TokenValues(entropy=entropy)(logits, TOKENS, 11)
    places = {tensor.untyped_storage().data_ptr() for tensor in (logits, *copies.kept)}
    assert len(places) == 1 + 1 + entropy


@pytest.mark.parametrize(("entropy", "bytes_of_a_logit"), [(False, 6), (True, 10)])
def test_the_peak_is_the_logits_and_a_copy_for_each_value(entropy: bool, bytes_of_a_logit: int) -> None:
    assert TokenValues(entropy=entropy).peak_bytes(5, 7, 2) == 5 * 7 * bytes_of_a_logit


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_is_positive_and_finite(temperature: float) -> None:
    with pytest.raises(McaError, match="expected a positive number"):
        TokenValues(temperature=temperature)
