"""Norms equal their formulas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron.layers.norm import Norm


def build(**settings: Any) -> Norm:
    config = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.float32,
        "sequence_parallel": False,
    }
    return Norm(SimpleNamespace(**(config | settings)), 8, eps=1e-6)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_rms_norm(zero_centred: bool) -> None:
    norm = build(layernorm_zero_centered_gamma=zero_centred)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert norm.weight.unique().item() == (0.0 if zero_centred else 1.0)


def test_layer_norm() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        build(normalization="LayerNorm")(x), torch.nn.functional.layer_norm(x, (8,), eps=1e-6)
    )


def test_bfloat16_is_normalised_in_fp32() -> None:
    norm = build(params_dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(norm(x), build()(x.float()).bfloat16())


def test_weights_are_marked_for_sequence_parallelism() -> None:
    assert build(sequence_parallel=True).weight.sequence_parallel
    assert not build().weight.sequence_parallel
