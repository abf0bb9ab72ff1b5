"""ALiBi: a bias on the scores that grows with the position of the key, with one slope per head.

No bias tensor is made: queries get channels with the slope, keys channels with the position.
"""

import math

import torch
from torch import Tensor

_CHANNELS = 8
"""Channels added to a head: four are used, the others pad to a multiple of 8 for the kernels."""
_STEP = 256
"""Positions up to this are exact in bfloat16, and so are that many multiples of it."""


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes of all heads, fp32: powers of one number; if not a power of two, others of its root."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)


def add_alibi_channels(query: Tensor, key: Tensor, slope: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Append the channels to queries ``[b, h, q, d]`` and keys ``[b, g, k, d]``.

    Args:
        query: The queries.
        key: The keys in order; softmax does not depend on the position of the first.
        slope: ``[h]``, fp32.
        scale: Factor on the scores.
    """
    exact = slope / scale
    rounded = exact.to(
        query.dtype
    ).float()  # the rounding error gets a channel, so that half precision is exact
    parts = torch.stack([rounded * _STEP, (exact - rounded) * _STEP, rounded, exact - rounded], -1).to(
        query.dtype
    )
    query_channels = query.new_zeros(*query.shape[:-1], _CHANNELS)
    query_channels[..., :4] = parts[:, None]
    positions = torch.arange(key.shape[2], device=key.device)
    far, rest = positions // _STEP, positions % _STEP
    key_channels = key.new_zeros(*key.shape[:-1], _CHANNELS)
    key_channels[..., :4] = torch.stack([far, far, rest, rest], -1).to(key.dtype)
    return torch.cat([query, query_channels], -1), torch.cat([key, key_channels], -1)
