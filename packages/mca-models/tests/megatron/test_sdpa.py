"""Our causal attention equals softmax over an explicit mask, forwards and backwards."""

import pytest
import torch

from mca_models.megatron.layers import sdpa
from mca_models.megatron.layers.sdpa import causal_attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    window: int | None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    rows = torch.arange(start, start + q.shape[2])[:, None]
    columns = torch.arange(k.shape[2])[None, :]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def random_qkv(queries: int, keys: int, channels: int = 16) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, channels)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("block", [512, 3])
@pytest.mark.parametrize("channels", [16, 8])
@pytest.mark.parametrize("start,window", [(0, None), (0, 5), (0, 100), (7, None), (7, 4)])
def test_equals_explicit_mask(
    start: int, window: int | None, channels: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", block)
    q, k, v = random_qkv(10, start + 10, channels)
    out = causal_attention(q, k, v, start=start, window=window)
    expected = reference(q, k, v, start, window)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his)


@pytest.mark.parametrize("block", [512, 3])
@pytest.mark.parametrize("start,window", [(0, None), (0, 5), (7, None), (7, 4)])
def test_a_sink_takes_its_share_of_the_weights(
    start: int, window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", block)
    q, k, v = random_qkv(10, start + 10)
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    out = causal_attention(q, k, v, start=start, window=window, sink=sink)
    expected = reference(q, k, v, start, window, sink)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v, sink))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v, sink))
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his)


def test_plain_causal_attention_makes_no_score_matrix() -> None:
    length, heads, channels = 4096, 1, 8
    q, k, v = (torch.randn(1, heads, length, channels) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        causal_attention(q, k, v)
    biggest = max(event.self_cpu_memory_usage for event in profile.events())
    assert biggest < length * length, "an allocation as large as a seq x seq byte mask"
