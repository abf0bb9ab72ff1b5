"""ALiBi: scores grow with the position of the key, by another slope for each head.

No mask of scores is made: queries get channels that hold the slope, keys channels that hold the position.
"""

import math

import torch
from torch import Tensor

_CHANNELS = 8
"""That are added to a head: four are used, the others are for kernels that want multiples of 8."""
_STEP = 256
"""Positions up to it are exact in bfloat16, and so are as many multiples of it."""


def alibi_slopes(heads: int) -> Tensor:
    """Those of all heads, fp32: powers of one number, and where heads are no power of two every other of its root's."""
    whole = 2 ** math.floor(math.log2(heads))
    found = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    found += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(found, dtype=torch.float32)


def add_alibi_channels(query: Tensor, key: Tensor, slope: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries ``[b, h, q, d]`` and keys ``[b, g, k, d]`` with the channels added.

    Args:
        query: The queries.
        key: Their keys, in order; which position the first has is of no consequence to a softmax.
        slope: ``[h]``, fp32.
        scale: What scores will be multiplied by.
    """
    wanted = slope / scale
    near = wanted.to(query.dtype).float()  # and what it rounds off, so that half precision leans as much
    parts = torch.stack([near * _STEP, (wanted - near) * _STEP, near, wanted - near], -1).to(query.dtype)
    own = query.new_zeros(*query.shape[:-1], _CHANNELS)
    own[..., :4] = parts[:, None]
    places = torch.arange(key.shape[2], device=key.device)
    far, rest = places // _STEP, places % _STEP
    theirs = key.new_zeros(*key.shape[:-1], _CHANNELS)
    theirs[..., :4] = torch.stack([far, far, rest, rest], -1).to(key.dtype)
    return torch.cat([query, own], -1), torch.cat([key, theirs], -1)
