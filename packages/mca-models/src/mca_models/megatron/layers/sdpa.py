"""Causal attention over torch's scaled_dot_product_attention, without a seq x seq mask.

Names of axes: b batch, h heads, g key/value heads, q queries, k keys, d channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

QUERY_BLOCK = 512
"""Queries that share one mask where torch's own causal mask does not fit; bounds the mask's rows."""


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

    Returns:
        ``[b, h, q, dv]``.
    """
    channels = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = _every_head(key, query), _every_head(value, query)
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


def _blocks(query: Tensor, start: int, window: int | None) -> Iterator[tuple[int, int, int, Tensor | None]]:
    """(first query, end of queries, first key, mask) of each block; no mask: torch's causal one."""
    length = query.shape[2]
    if start == 0 and (window is None or window >= length):
        yield 0, length, 0, None
        return
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, start + first - window + 1)
        positions = torch.arange(start + first, start + last, device=query.device)[:, None]
        keys = torch.arange(low, start + last, device=query.device)[None, :]
        allowed = keys <= positions
        if window is not None:
            allowed &= keys > positions - window
        yield first, last, low, allowed
