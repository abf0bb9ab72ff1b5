"""Lightning attention: outputs and gradients of its chunks are those of the recurrence, and decays transformers'."""

from types import SimpleNamespace

import pytest
import tiny_hf
import torch
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from mca_models.megatron.features.lightning_attention import decay_rates, lightning_attention
from mca_models.templates import config_from_hf, get_family


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """Compute one token after the other."""
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    outputs = []
    for token in range(query.shape[2]):
        added = key[:, :, token, :, None] * value[:, :, token, None]
        state = (-rates).exp()[:, None, None] * state + added
        outputs.append((query[:, :, token, None] @ state).squeeze(-2))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_chunks_compute_the_recurrence(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    ]
    rates = decay_rates(3, 1, 4).double()
    expected, found = recurrence(*inputs, rates), lightning_attention(*inputs, rates)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)  # sums of at most 150 products of fp64
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for one, other in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layer", [0, 3, 79])
def test_rates_of_decay_are_those_of_transformers(layer: int) -> None:
    module = SimpleNamespace(num_attention_heads=64, num_hidden_layers=80, layer_idx=layer)
    assert torch.equal(decay_rates(64, layer, 80), MiniMaxLightningAttention.get_slope_rate(module).flatten())


def test_tables_of_decays_in_files_are_known_and_not_read() -> None:
    model_type, different = tiny_hf.ALL["minimax"]
    config = config_from_hf({"model_type": model_type, **tiny_hf.SIZE, **different})
    ignored = get_family("minimax").ignored_hf(config)
    assert len(ignored) == 8 and "model.layers.2.self_attn.slope_rate" in ignored
