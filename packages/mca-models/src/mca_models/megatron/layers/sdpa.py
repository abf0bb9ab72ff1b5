"""Causal attention with torch's scaled_dot_product_attention, without a seq x seq mask; also with a soft cap.

Inside images attention may be bidirectional, as in Gemma 3.

Axes: b batch, h heads, g key/value heads, q queries, k keys, d channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 512
"""Queries that share one mask if torch's causal mask does not apply; limits the rows of the mask."""
ALIGNED = 8
"""Alignment in elements that CUDA's kernels need for rows of a mask and its first element."""

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
    """Attend with queries at positions ``start, start + 1, ...`` to the keys at or before them.

    Args:
        query: ``[b, h, q, d]``.
        key: ``[b, g, k, d]``, positions from 0; h is a multiple of g.
        value: ``[b, g, k, dv]``.
        start: Position of the first query.
        window: Maximum number of keys that a query sees, its own included; None: all.
        scale: Factor on the scores; None: d ** -0.5.
        dropout: Probability that a weight is dropped.
        sink: ``[h]``, attention sink: an additional score per head without a value.
        softcap: Scores x become ``softcap * tanh(x / softcap)`` (not the sink's); None: uncapped.

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
        # torch's CPU kernel needs equal sizes, else it makes the full score matrix
        value = pad(value, (0, query.shape[-1] - channels))
    if sink is not None and window is None:  # the sink precedes all keys
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
    """Attend block by block; all masks are views of one, so that autograd saves no seq x seq tensor."""
    sink, scale, dropout = settings
    allowed = _mask(query, start, window)
    mask = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~allowed, float("-inf"))  # torch would convert each boolean mask to one of these
    pieces = []
    for first, last, low in blocks(query.shape[2], start, window):
        visible = _part(mask, last - first, start + last - low)
        k, v = key[:, :, low : start + last], value[:, :, low : start + last]
        if sink is not None:
            k, v = _after_sink(k, v, sink)
            visible = pad(visible, (1, 0))
        q = query[:, :, first:last]
        pieces.append(
            scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale)
        )
    return torch.cat(pieces, 2)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, window: int | None, settings: _Capping
) -> Tensor:
    """Attend with capped scores, which no kernel computes; a block's scores are freed after the block.

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
    """Add a channel to queries and keys, and return a key whose product with every query is ``score``.

    Eight channels are added, because fused kernels need a multiple.
    """
    channels = query.shape[-1]
    ones = query.new_ones(*query.shape[:-1], 1)
    sink = pad(score.to(key.dtype).view(1, -1, 1, 1), (channels, 7))
    padded = torch.cat([query, pad(ones, (0, 7))], -1)
    return padded, pad(key, (0, 8)), sink.expand(query.shape[0], -1, -1, -1)


def _after_sink(key: Tensor, value: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend the sink to keys and values."""
    return torch.cat([sink, key], 2), pad(value, (0, 0, 1, 0))


def every_head(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of ``x`` to the number of query heads."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def blocks(length: int, start: int, window: int | None) -> Iterator[_Block]:
    """Yield (first query, end of queries, first key) of each block; only the first block can be short."""
    size = min(QUERY_BLOCK, length)
    for last in range(length % size or size, length + 1, size):
        first = max(0, last - size)
        low = 0 if window is None else max(0, start + first - window + 1)
        yield first, last, low


def _mask(query: Tensor, start: int, window: int | None) -> Tensor:
    """Return the mask ``[queries, keys]`` of a block, both counted from the last; see `_part`."""
    length = query.shape[2]
    rows = min(QUERY_BLOCK, length)
    columns = start + length if window is None else min(start + length, rows + window - 1)
    width = -(-columns // ALIGNED) * ALIGNED
    positions = torch.arange(columns - rows, columns, device=query.device)[:, None]
    keys = torch.arange(width, device=query.device)[None, :]
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    return visible[:, :columns]


def _part(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return the last ``queries`` rows and ``keys`` columns of ``_mask``, a view if CUDA's kernels accept it."""
    part = mask[mask.shape[0] - queries :, mask.shape[1] - keys :]
    return part if part.storage_offset() % ALIGNED == 0 else part.clone()


def bidirectional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *,
    start: int,
    reach: int,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with queries at positions ``start, start + 1, ...`` to the keys before their ends.

    The mask of a block is freed after the block; the backward pass recomputes it.

    Args:
        query: ``[b, h, q, d]``.
        key: ``[b, g, k, d]``, positions from 0; h is a multiple of g.
        value: ``[b, g, k, d]``.
        ends: ``[b, q]``: number of keys up to the last that a query sees; above its position, by at most ``reach + 1``.
        start: Position of the first query.
        reach: Maximum number of keys after a query that it sees.
        window: Maximum number of keys up to its own that a query sees; None: all.
        scale: Factor on the scores; None: d ** -0.5.
        dropout: Probability that a weight is dropped.

    Returns:
        ``[b, h, q, d]``.
    """
    key, value = every_head(key, query), every_head(value, query)
    pieces = []
    for first, last, low in blocks(query.shape[2], start, window):
        high = min(key.shape[2], start + last + reach)
        pieces.append(
            checkpoint(
                _block,
                query[:, :, first:last],
                key[:, :, low:high],
                value[:, :, low:high],
                ends[:, first:last] - low,
                start + first - low,
                window,
                scale,
                dropout,
                use_reentrant=False,
                preserve_rng_state=dropout > 0,
            )
        )
    return torch.cat(pieces, 2)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    start: int,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    positions = torch.arange(-(-keys // ALIGNED) * ALIGNED, device=query.device)
    visible = positions < ends[..., None]
    if window is not None:
        visible = visible & (
            positions > torch.arange(start, start + queries, device=query.device)[:, None] - window
        )
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(~visible, float("-inf"))[:, None, :, :keys]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
