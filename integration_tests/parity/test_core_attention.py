"""Our core attention in every combination, cut over context ranks or not, equals softmax over one written-out mask."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import run_ranks

pytestmark = pytest.mark.ranks

HEADS, GROUPS, CHANNELS = 4, 2, 16
LENGTHS = (8, 16, 4, 12)
SCALE = 0.3


@dataclass(frozen=True)
class Kind:
    """One kind of attention.

    Args:
        window: Keys that a query sees at most.
        sink: Whether heads have a score of their own.
        softcap: Where scores are capped.
        packed: Whether sequences of ``LENGTHS`` lie behind each other, instead of two rows beside each other.
        width: Channels of a value.
    """

    window: int | None
    sink: bool
    softcap: float | None
    packed: bool
    width: int


KINDS = [
    Kind(*each) for each in itertools.product((None, 5), (False, True), (None, 2.0), (False, True), (16, 8))
]


def inputs(kind: Kind) -> list[Tensor]:
    """Query, key, value ``[s, b, heads, channels]``, the weight of each output, and the sinks ``[heads]``."""
    generator = torch.Generator().manual_seed(5)
    tokens, rows = sum(LENGTHS), 1 if kind.packed else 2
    shapes = [(HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, kind.width), (HEADS, kind.width)]
    made = [torch.randn(tokens, rows, *x, generator=generator, dtype=torch.float64) for x in shapes]
    return [*made, torch.randn(HEADS, generator=generator, dtype=torch.float64)]


def written_out(kind: Kind) -> list[Tensor]:
    """Output and gradients of query, key, value and sinks, from a mask over all tokens."""
    query, key, value, weight, sink = (x.requires_grad_() for x in inputs(kind))
    lengths = LENGTHS if kind.packed else (sum(LENGTHS),)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    if kind.window:
        seen &= place[:, None] - place < kind.window
    keys, values = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) * SCALE
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if kind.sink:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    out = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1)[..., : len(place)], values)
    (out * weight).sum().backward()
    return [
        out.detach(),
        *(x.grad for x in (query, key, value)),
        sink.grad if kind.sink else torch.zeros(HEADS),
    ]


def of_kind(core: Any, kind: Kind, group: Any, dropout: float = 0.0) -> tuple[Any, list[Tensor], Tensor]:
    """A core attention of this class, its inputs of this context rank, and the weight of each output."""
    config = SimpleNamespace(
        softmax_type="learnable" if kind.sink else "vanilla",
        attention_dropout=dropout,
        sequence_parallel=False,
        window_size=(kind.window - 1, 0) if kind.window else None,
        window_attn_skip_freq=None,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float64,
    )
    attention = core(
        config,
        1,
        SimpleNamespace(name="causal"),
        "self",
        softmax_scale=SCALE,
        pg_collection=SimpleNamespace(cp=group),
    )
    *qkv, weight, sink = (own_rows(x, kind, group) if x.dim() > 1 else x for x in inputs(kind))
    if kind.sink:
        attention.softmax_offset.data.copy_(sink)
    return attention, [x.clone().requires_grad_() for x in qkv], weight


def ours(kind: Kind, group: Any) -> list[Tensor]:
    """The same from ``CoreAttention``: this context rank's tokens; of the sinks' gradient its part."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mca_models.megatron.layers.attention import AttentionOptions, CoreAttention, attention_with_options

    core = attention_with_options(AttentionOptions(softcap=kind.softcap)) if kind.softcap else CoreAttention
    attention, leaves, weight = of_kind(core, kind, group)
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    longest = max(LENGTHS)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    out = attention(
        *((x.squeeze(1) if kind.packed else x) for x in leaves),
        packed_seq_params=packed if kind.packed else None,
    ).view(weight.shape)
    (out * weight).sum().backward()
    own = attention.softmax_offset.grad if kind.sink else torch.zeros(HEADS)
    return [out.detach(), *(x.grad for x in leaves), own]


def own_rows(x: Tensor, kind: Kind, group: Any) -> Tensor:
    """The rows of this context rank."""
    from mca_models.megatron.layers.zigzag import take_rank_tokens

    sequences = x.split(LENGTHS) if kind.packed else [x]
    return torch.cat([take_rank_tokens(each, 0, group.rank(), group.size()) for each in sequences])


def differences() -> list[float]:
    """The largest difference of each kind. Runs on every rank."""
    group = torch.distributed.group.WORLD
    found = []
    for kind in KINDS:
        *whole, sink = written_out(kind)
        *cut, own = ours(kind, group)
        torch.distributed.all_reduce(own)
        pairs = [*zip(cut, (own_rows(x, kind, group) for x in whole), strict=True), (own, sink)]
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return found


@pytest.mark.parametrize("context_ranks", [1, 2])
def test_every_combination_equals_a_mask_written_out(context_ranks: int) -> None:
    for of_rank in run_ranks(context_ranks, differences):
        wrong = {kind: found for kind, found in zip(KINDS, of_rank, strict=True) if found > 1e-10}
        assert not wrong


def test_combinations_differ() -> None:
    outputs = [written_out(kind)[0] for kind in KINDS if kind.width == CHANNELS and not kind.packed]
    assert all(float((a - b).abs().max()) > 1e-2 for a, b in itertools.combinations(outputs, 2))


def dropped() -> dict[str, tuple[float, float]]:
    """Return the loss of each core with dropped weights, and its gradient times the values, in which it is linear."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mca_models.megatron.features.topk_attention import TopKSparseAttention
    from mca_models.megatron.layers.attention import AttentionOptions, CoreAttention, attention_with_options

    class AllBefore(TopKSparseAttention):
        def _index(self, lengths: tuple[int, ...]) -> Any:
            return (), [torch.zeros(length) for length in lengths]

        def _select(self, of_queries: Any, keys: Tensor, start: int) -> Tensor:
            places = torch.arange(len(keys))
            return (places <= places[start:, None]).expand(2, 1, -1, -1)

    get_cuda_rng_tracker().add("model-parallel-rng", 5)
    cores = {
        "plain": CoreAttention,
        "capped": attention_with_options(AttentionOptions(softcap=2.0)),
        "chosen": AllBefore,
    }
    found = {}
    for name, core in cores.items():
        attention, leaves, weight = of_kind(core, KINDS[0], torch.distributed.group.WORLD, dropout=0.5)
        loss = (attention(*leaves).view(weight.shape) * weight).sum()
        loss.backward()
        found[name] = (float(loss.detach()), float((leaves[2].grad * leaves[2].detach()).sum()))
    return found


def test_the_gradient_is_of_what_was_dropped() -> None:
    (found,) = run_ranks(1, dropped)
    assert {name: gradient for name, (_, gradient) in found.items()} == {
        name: pytest.approx(loss, rel=1e-9) for name, (loss, _) in found.items()
    }
