"""Initial values of parameters that are not drawn from a normal distribution."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from mca_models.megatron.features import mamba, mlp, selective_scan
from mca_models.megatron.tensors import seeded_generator


def test_mamba_begins_with_rates_of_its_heads_and_small_time_steps() -> None:
    start = mamba._start
    name = "decoder.layers.0.self_attention.dt_bias"
    steps = softplus(start(name, (4096,), 5))  # type: ignore[arg-type]
    drawn = torch.empty(4096).uniform_(0.0, 1.0, generator=seeded_generator(f"5/{name}"))
    torch.testing.assert_close(steps, 0.001 * 100**drawn, rtol=1e-4, atol=0)  # softplus of fp32
    assert start("layers.0.A_log", (3,), 5).tolist() == pytest.approx([0, math.log(2), math.log(3)])  # type: ignore[union-attr]
    for name in ("layers.0.D", "layers.0.self_attention.norm.weight", "layers.0.mamba.norm.weight"):
        assert start(name, (2, 3), 5).tolist() == [[1] * 3] * 2  # type: ignore[union-attr]
    assert start("layers.0.in_proj.weight", (2,), 5) is None


def test_a_selective_scan_begins_with_rates_of_its_channels() -> None:
    start = selective_scan._start
    rates = start("layers.0.A_log", (2, 3), 5)
    assert rates is not None
    assert rates.tolist() == [pytest.approx([0, math.log(2), math.log(3)])] * 2
    rates[0, 0] = 7.0
    assert rates[1, 0] == 0, "each row has its own memory"
    assert start("layers.0.D", (2,), 5).tolist() == [1, 1]  # type: ignore[union-attr]
    assert start("layers.0.in_proj.weight", (2,), 5) is None


def test_xielu_begins_with_its_published_numbers() -> None:
    first = {
        "alpha_p": math.log(math.expm1(0.8)),
        "alpha_n": math.log(math.expm1(0.3)),
        "beta": 0.5,
        "eps": -1e-6,
    }
    for name, value in first.items():
        found = mlp._start(f"layers.0.mlp.activation_func.{name}", (1,), 5)
        assert found is not None and found.tolist() == pytest.approx([value], rel=1e-6)
    assert mlp._start("layers.0.mlp.linear_fc1.weight", (1,), 5) is None
