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
ALIGNED = 8
"""Elements: CUDA's kernels want rows of a mask, and its first element, at multiples of it."""

_Block = tuple[int, int, int]
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
    length, channels = query.shape[2], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = every_head(key, query), every_head(value, query)
    if window is not None and window >= start + length:
        window = None
    if softcap is not None:
        return _capped_attention(query, key, value, start, window, (sink, scale, softcap, dropout))
    if sink is not None:
        query, key, sink = _with_sink(query, key, sink / scale)
    if channels < query.shape[-1]:
        # torch's CPU kernel wants equal sizes, else it makes the whole score matrix
        value = pad(value, (0, query.shape[-1] - channels))
    if sink is not None and window is None:  # it stands before all keys
        key, value = _after_sink(key, value, sink)
        if start:
            start += 1
        else:
            query = pad(query, (0, 0, 1, 0))  # keeps the causal mask square
        sink = None
    if window is None and start == 0:
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
    else:
        out = _masked_attention(query, key, value, start, window, (sink, scale, dropout))
    return out[:, :, -length:, :channels]


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    window: int | None,
    settings: tuple[Tensor | None, float, float],
) -> Tensor:
    """Attention block by block; all masks are views of one, so that what autograd keeps is no seq x seq."""
    sink, scale, dropout = settings
    allowed = _mask(query, start, window)
    mask = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~allowed, float("-inf"))  # torch would make one of these of each boolean one
    pieces = []
    for first, last, low in blocks(query.shape[2], start, window):
        seen = _part(mask, last - first, start + last - low)
        k, v = key[:, :, low : start + last], value[:, :, low : start + last]
        if sink is not None:
            k, v = _after_sink(k, v, sink)
            seen = pad(seen, (1, 0))
        q = query[:, :, first:last]
        pieces.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, scale=scale))
    return torch.cat(pieces, 2)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, window: int | None, settings: _Capping
) -> Tensor:
    """Attention with capped scores, which no kernel computes: a block's scores live no longer than the block.

    The backward pass computes them again.
    """
    mask = _mask(query, start, window)
    return torch.cat(
        [
            checkpoint(
                _capped_block,
                query[:, :, first:last],
                key[:, :, low : start + last],
                value[:, :, low : start + last],
                _part(mask, last - first, start + last - low),
                *settings,
                use_reentrant=False,
                preserve_rng_state=settings[-1] > 0,
            )
            for first, last, low in blocks(query.shape[2], start, window)
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


def _after_sink(key: Tensor, value: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the sink as their first one."""
    return torch.cat([sink, key], 2), pad(value, (0, 0, 1, 0))


def every_head(x: Tensor, query: Tensor) -> Tensor:
    """``x`` with its heads repeated to the number of query heads."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def blocks(length: int, start: int, window: int | None) -> Iterator[_Block]:
    """(first query, end of queries, first key) of each block; the first one is the short one."""
    size = min(QUERY_BLOCK, length)
    for last in range(length % size or size, length + 1, size):
        first = max(0, last - size)
        low = 0 if window is None else max(0, start + first - window + 1)
        yield first, last, low


def _mask(query: Tensor, start: int, window: int | None) -> Tensor:
    """Which keys a block's queries see, ``[queries, keys]``, both counted from the last: see `_part`."""
    length = query.shape[2]
    rows = min(QUERY_BLOCK, length)
    columns = start + length if window is None else min(start + length, rows + window - 1)
    width = -(-columns // ALIGNED) * ALIGNED
    places = torch.arange(columns - rows, columns, device=query.device)[:, None]
    keys = torch.arange(width, device=query.device)[None, :]
    seen = keys <= places
    if window is not None:
        seen &= keys > places - window
    return seen[:, :columns]


def _part(mask: Tensor, queries: int, keys: int) -> Tensor:
    """The last ``queries`` rows and ``keys`` columns of ``_mask``: a view wherever CUDA's kernels take one."""
    part = mask[mask.shape[0] - queries :, mask.shape[1] - keys :]
    return part if part.storage_offset() % ALIGNED == 0 else part.clone()
