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
    softcap: float | None = None,
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    rows = torch.arange(start, start + q.shape[2])[:, None]
    columns = torch.arange(k.shape[2])[None, :]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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
@pytest.mark.parametrize("with_sink,softcap", [(True, None), (False, 0.7), (True, 0.7)])
@pytest.mark.parametrize("start,window", [(0, None), (0, 5), (7, None), (7, 4)])
def test_sinks_and_caps_equal_explicit_scores(
    start: int,
    window: int | None,
    with_sink: bool,
    softcap: float | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", block)
    q, k, v = random_qkv(10, start + 10)
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True) if with_sink else None
    out = causal_attention(q, k, v, start=start, window=window, sink=sink, softcap=softcap)
    expected = reference(q, k, v, start, window, sink, softcap)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    leaves = (q, k, v) if sink is None else (q, k, v, sink)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his)


def test_dropout_of_capped_scores_is_the_same_in_the_backward_pass() -> None:
    q, k, v = random_qkv(12, 12)
    torch.manual_seed(3)
    out = causal_attention(q, k, v, softcap=0.7, dropout=0.5)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # the output is linear in the values: its gradient times them is the output again
    torch.testing.assert_close((grad * v).sum(), out.sum())


KINDS = [(None, None, 0), (64, None, 0), (None, 2.0, 0), (None, None, 1)]
"""Window, cap, and how many lengths before the queries there are keys (as on a later context rank)."""


def long_sequence(
    length: int, window: int | None, softcap: float | None, start: int, with_sink: bool
) -> torch.Tensor:
    """One head, so that a seq x seq mask of bytes is the least that is forbidden."""
    shapes = [(1, 1, length, 8)] + [(1, 1, (start + 1) * length, 8)] * 2
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    sink = torch.zeros(1, requires_grad=True) if with_sink else None
    return causal_attention(q, k, v, start=start * length, window=window, softcap=softcap, sink=sink)


@pytest.mark.parametrize("window,softcap,start", KINDS)
@pytest.mark.parametrize("with_sink", [False, True])
def test_no_allocation_is_as_large_as_a_score_matrix(
    window: int | None, softcap: float | None, start: int, with_sink: bool
) -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        long_sequence(3072, window, softcap, start, with_sink).sum().backward()
    biggest = max(event.self_cpu_memory_usage for event in profile.events())
    assert biggest < 3072 * 3072 * (start + 1)


@pytest.mark.parametrize("window,softcap,start", KINDS)
@pytest.mark.parametrize("with_sink", [False, True])
def test_what_is_kept_for_the_backward_pass_grows_with_the_length(
    window: int | None, softcap: float | None, start: int, with_sink: bool
) -> None:
    kept = {}
    for length in (1536, 3072):
        storages: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor, storages: dict[int, torch.Tensor] = storages) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            long_sequence(length, window, softcap, start, with_sink)
        kept[length] = sum(x.untyped_storage().nbytes() for x in storages.values())
    assert kept[3072] < 2.2 * kept[1536]


@pytest.mark.parametrize(
    ("length", "start", "window", "expected"),
    [
        (1, 0, None, [(0, 1, 0)]),
        (3, 5, None, [(0, 3, 0)]),
        (4, 0, None, [(0, 4, 0)]),
        (5, 0, None, [(0, 1, 0), (1, 5, 0)]),
        (10, 3, 6, [(0, 2, 0), (2, 6, 0), (6, 10, 4)]),
        (8, 3, 3, [(0, 4, 1), (4, 8, 5)]),
    ],
)
def test_blocks_have_four_queries_and_the_keys_that_the_first_sees(
    length: int,
    start: int,
    window: int | None,
    expected: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 4)
    assert list(sdpa.blocks(length, start, window)) == expected
