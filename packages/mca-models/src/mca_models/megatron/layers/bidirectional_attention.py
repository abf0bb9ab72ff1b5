"""Bidirectional attention inside images, causal elsewhere, as in Gemma 3.

Axes: b batch, h heads, g key/value heads, q queries, k keys, d channels.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mca_models.megatron.layers.sdpa import ALIGNED, blocks, every_head


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
