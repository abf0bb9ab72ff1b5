"""Causal attention over torch's scaled_dot_product_attention, without a seq x seq mask; with capped scores too.

Names of axes: b batch, h heads, g key/value heads, q queries, k keys, d channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 512
"""Queries that share one mask where torch's own causal mask does not fit; bounds the mask's rows."""

_Block = tuple[int, int, int, Tensor]
_Capping = tuple[Tensor | None, float, float, float]


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int = 0,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of queries at positions ``start, start + 1, ...`` to the keys at or before them.

    Args:
        query: ``[b, h, q, d]``.
        key: ``[b, g, k, d]``, positions from 0; h is a multiple of g.
        value: ``[b, g, k, dv]``.
        start: Position of the first query.
        window: How many keys a query sees at most, its own included; None: all.
        scale: Factor on the scores; None: d ** -0.5.
        dropout: Probability that a weight is dropped.
        sink: ``[h]``, a score of each head that every query has beside its keys', and that gives no value.
        softcap: Scores x become ``softcap * tanh(x / softcap)`` (a sink's does not); None: they stay.

    Returns:
        ``[b, h, q, dv]``.
    """
    channels = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = _every_head(key, query), _every_head(value, query)
    if softcap is not None:
        settings = (sink, scale, softcap, dropout)
        return _capped_attention(query, key, value, _masked_blocks(query, start, window), settings)
    if sink is not None:
        query, key, sink_key = _with_sink(query, key, sink / scale)
    if channels < query.shape[-1]:
        # torch's CPU kernel wants equal sizes, else it makes the whole score matrix
        value = pad(value, (0, query.shape[-1] - channels))
    pieces = []
    for first, last, low, mask in _blocks(query, start, window):
        q, k, v = query[:, :, first:last], key[:, :, low : start + last], value[:, :, low : start + last]
        if sink is not None:
            q, k, v, mask = _after_sink(q, k, v, mask, sink_key)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
        )
        pieces.append(out[:, :, -(last - first) :])
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    return out[..., :channels]


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Iterator[_Block], settings: _Capping
) -> Tensor:
    """Attention with capped scores, which no kernel computes: a block's scores live no longer than the block.

    The backward pass computes them again.
    """
    return torch.cat(
        [
            checkpoint(
                _capped_block,
                query[:, :, first:last],
                key[:, :, low : low + mask.shape[1]],
                value[:, :, low : low + mask.shape[1]],
                mask,
                *settings,
                use_reentrant=False,
                preserve_rng_state=settings[-1] > 0,
            )
            for first, last, low, mask in blocks
        ],
        2,
    )


def _capped_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sink: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    scores = ((query @ key.mT) * (scale / softcap)).tanh() * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=exact)[..., : key.shape[2]].to(value.dtype)
    return (dropped(weights, dropout) if dropout else weights) @ value


def _with_sink(query: Tensor, key: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with a further channel, and a key whose product with every query is ``score``.

    Eight channels are added, because fused kernels want a multiple.
    """
    channels = query.shape[-1]
    ones = query.new_ones(*query.shape[:-1], 1)
    sink = pad(score.to(key.dtype).view(1, -1, 1, 1), (channels, 7))
    padded = torch.cat([query, pad(ones, (0, 7))], -1)
    return padded, pad(key, (0, 8)), sink.expand(query.shape[0], -1, -1, -1)


def _after_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A block with the sink as its first key; the causal mask stays square by a first query of zeros."""
    key, value = torch.cat([sink, key], 2), pad(value, (0, 0, 1, 0))
    if mask is None:
        return pad(query, (0, 0, 1, 0)), key, value, None
    return query, key, value, pad(mask, (1, 0), value=True)


def _every_head(x: Tensor, query: Tensor) -> Tensor:
    """``x`` with its heads repeated to the number of query heads."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _blocks(
    query: Tensor, start: int, window: int | None
) -> Iterator[_Block] | Iterator[tuple[int, int, int, None]]:
    """``_masked_blocks``, or one block without a mask where torch's causal one does."""
    length = query.shape[2]
    if start == 0 and (window is None or window >= length):
        return iter([(0, length, 0, None)])
    return _masked_blocks(query, start, window)


def _masked_blocks(query: Tensor, start: int, window: int | None) -> Iterator[_Block]:
    """(first query, end of queries, first key, mask of queries and keys) of each block."""
    length = query.shape[2]
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, start + first - window + 1)
        positions = torch.arange(start + first, start + last, device=query.device)[:, None]
        keys = torch.arange(low, start + last, device=query.device)[None, :]
        allowed = keys <= positions
        if window is not None:
            allowed &= keys > positions - window
        yield first, last, low, allowed
