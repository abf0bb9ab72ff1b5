"""Choice of the code for linear attention, and the arguments of kernels.

transformers' plain functions stand for the kernels: they have the kernels' interface, and its models call both alike.
"""

import logging
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from mca_models.megatron import platform
from mca_models.megatron.features import kernels
from mca_models.megatron.features.delta_rule import delta_rule
from mca_models.megatron.features.mamba import state_space_layer
from mca_models.megatron.features.recurrent_layers import CausalConvolution
from mca_models.megatron.features.selective_scan import selective_scan

QWEN, KIMI = "qwen3_next", "kimi_linear"


def of_transformers(family: str, name: str) -> Callable[..., object]:
    function: Callable[..., object] = getattr(
        import_module(f"transformers.models.{family}.modeling_{family}"), name
    )
    return function


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    kernels.kernel.cache_clear()
    yield
    kernels.kernel.cache_clear()


def inputs(*, by_channel: bool, device: str = "cpu") -> list[torch.Tensor]:
    """Return inputs of 70 tokens: two heads of keys, four of values."""
    generator = torch.Generator().manual_seed(0)
    heads = 4 if by_channel else 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, 70, *shape, generator=generator)

    decay = -random(4, 8).abs() if by_channel else -random(4).abs()
    made = [random(heads, 8), random(heads, 8), random(4, 6), decay, random(4).sigmoid()]
    return [x.to(device).requires_grad_() for x in made]


def with_gradients(out: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


@pytest.mark.parametrize(
    "by_channel,family,name",
    [(False, QWEN, "torch_chunk_gated_delta_rule"), (True, KIMI, "chunk_kimi_delta_attention")],
)
def test_the_rule_in_plain_torch_is_what_a_kernel_is_asked_for(
    by_channel: bool, family: str, name: str
) -> None:
    given = inputs(by_channel=by_channel)
    ours, theirs = (delta_rule(*given, kernel) for kernel in (None, of_transformers(family, name)))
    for a, b in zip(with_gradients(ours, given), with_gradients(theirs, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_in_plain_torch_is_what_a_kernel_is_asked_for(bias: bool) -> None:
    x = torch.randn(2, 7, 12).transpose(1, 2)
    convolution = torch.nn.Conv1d(12, 12, 4, groups=12, bias=bias)
    plain, kernel = (
        CausalConvolution.from_conv1d(convolution, k)(x)
        for k in (None, of_transformers(QWEN, "causal_conv1d_fn"))
    )
    torch.testing.assert_close(plain, kernel)


def test_a_state_space_in_plain_torch_is_what_a_kernel_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    into, read = random(2, 300, 2, 5), random(2, 300, 2, 5)
    given = [random(2, 300, 4, 6), random(2, 300, 4).exp() / 9, -random(4).exp(), into, read, random(4)]
    given = [x.requires_grad_() for x in given]
    plain, kernel = (
        state_space_layer(*given, k) for k in (None, of_transformers("bamba", "mamba2_chunk_scan"))
    )
    for a, b in zip(with_gradients(plain, given), with_gradients(kernel, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_selective_scan_in_plain_torch_is_what_a_kernel_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = [random(2, 150, 6), random(2, 150, 6), random(6), -random(6, 5).exp()]
    given = [x.requires_grad_() for x in (*given, random(2, 150, 5), random(2, 150, 5), random(6))]
    plain, kernel = (
        selective_scan(*given, k) for k in (None, of_transformers("jamba", "mamba_selective_scan"))
    )
    for a, b in zip(with_gradients(plain, given), with_gradients(kernel, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_strong_fade_of_channels_does_not_overflow() -> None:
    query, key, value, decay, beta = inputs(by_channel=True)
    out = delta_rule(query, key, value, decay * 1000, beta, None)
    assert all(x.isfinite().all() for x in with_gradients(out, [query, key, value]))


@pytest.mark.parametrize(
    "device,dtype,why",
    [
        ("cpu", torch.bfloat16, "the device is cpu"),
        ("cuda", torch.float32, "the model is in float32"),
        ("cuda", torch.bfloat16, r"flash-linear-attention cannot be used .*; install mca-models\[kernels\]"),
    ],
)
def test_plain_torch_is_chosen_and_said_once(
    device: str,
    dtype: torch.dtype,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(kernels._MODULES, "chunk_kda", ("fla_that_is_not_there", "flash-linear-attention"))
    with caplog.at_level(logging.INFO):
        assert [kernels.kernel("chunk_kda", device, dtype) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("chunk_kda: plain torch, as ")

    assert re.search(why, record.getMessage())


@pytest.mark.parametrize("deterministic,why", [(True, "deterministic_mode is on"), (False, "cannot be used")])
def test_the_device_that_trains_and_the_mode_decide(
    deterministic: bool, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setitem(kernels._MODULES, "chunk_kda", ("fla_that_is_not_there", "flash-linear-attention"))
    config = SimpleNamespace(params_dtype=torch.bfloat16, deterministic_mode=deterministic)
    with caplog.at_level(logging.INFO):
        assert kernels.find_kernel("chunk_kda", config) is None
    assert why in caplog.messages[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_kernels_agree_with_plain_torch(name: str) -> None:
    pytest.importorskip("fla")
    kernel = kernels.kernel(name, "cuda", torch.bfloat16)
    assert kernel is not None
    given = inputs(by_channel=name == "chunk_kda", device="cuda")
    wide = with_gradients(delta_rule(*given, None), given)
    half = [x.detach().to(torch.bfloat16) for x in given[:3]] + [
        given[3].detach(),
        given[4].detach().bfloat16(),
    ]
    half = [x.requires_grad_() for x in half]
    for a, b in zip(with_gradients(delta_rule(*half, kernel), half), wide, strict=True):
        assert (a.float() - b).abs().max() <= 3e-2 * b.abs().max()


@pytest.mark.gpu
def test_the_kernel_of_convolutions_agrees_with_plain_torch() -> None:
    pytest.importorskip("causal_conv1d")
    kernel = kernels.kernel("causal_conv1d_fn", "cuda", torch.bfloat16)
    assert kernel is not None
    x = torch.randn(2, 64, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    convolution = torch.nn.Conv1d(32, 32, 4, groups=32, device="cuda", dtype=torch.bfloat16)
    a, b = (CausalConvolution.from_conv1d(convolution, chosen)(x).float() for chosen in (kernel, None))
    assert (a - b).abs().max() <= 3e-2 * b.abs().max()


@pytest.mark.gpu
def test_the_kernel_of_state_spaces_agrees_with_plain_torch() -> None:
    pytest.importorskip("mamba_ssm")
    kernel = kernels.kernel("mamba_chunk_scan_combined", "cuda", torch.bfloat16)
    assert kernel is not None
    torch.manual_seed(0)
    x, into, read = (torch.randn(2, 300, *s, device="cuda") for s in ((4, 64), (2, 64), (2, 64)))
    step, rate = torch.rand(2, 300, 4, device="cuda") / 9, -torch.rand(4, device="cuda")
    half = [part.bfloat16().requires_grad_() for part in (x, into, read)]
    outs = [
        with_gradients(state_space_layer(half[0], step, rate, half[1], half[2], rate, k), half)
        for k in (kernel, None)
    ]
    for a, b in zip(*outs, strict=True):
        assert (a.float() - b.float()).abs().max() <= 3e-2 * b.float().abs().max()
