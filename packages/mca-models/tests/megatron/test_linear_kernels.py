"""Which code computes linear attention, and that kernels are given what they ask for.

transformers' plain functions stand for the kernels: they have the kernels' interface, and its models call both alike.
"""

import logging
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

from mca_models.megatron.families import kernels
from mca_models.megatron.families.delta_rule import delta_rule
from mca_models.megatron.families.whole_sequences import convolved

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
    """Of 70 tokens: two heads of keys, four of values."""
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
    plain, kernel = (convolved(x, convolution, k) for k in (None, of_transformers(QWEN, "causal_conv1d_fn")))
    torch.testing.assert_close(plain, kernel)


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
    monkeypatch.setitem(kernels._WHERE, "chunk_kda", ("fla_that_is_not_there", "flash-linear-attention"))
    with caplog.at_level(logging.INFO):
        assert [kernels.kernel("chunk_kda", device, dtype) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("chunk_kda: plain torch, as ")

    assert re.search(why, record.getMessage())


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
    a, b = (convolved(x, convolution, chosen).float() for chosen in (kernel, None))
    assert (a - b).abs().max() <= 3e-2 * b.abs().max()
