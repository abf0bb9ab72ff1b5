"""One number for all weights of a live model, the same on every layout."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed
from torch import Tensor

from mca_models.megatron import platform
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.factory.fill import is_first_replica, shard_rank_and_size
from mca_models.weights import Param

_STEP = 1 << 22
"""Elements that are converted to 64-bit integers at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS, _SHIFT = (-0x61C8864680B583EB, -0x3B314601E57A13AD), 33
"""Constants that spread the bits of a number over 64; 0 stays 0."""


def fingerprint(models: LiveModel, extra: Iterable[tuple[Param, Tensor]] = ()) -> int:
    """Return the fingerprint of the current parameters and of ``extra`` (an adapter's); collective.

    The bits of every element are spread over 64 and added up, each parameter's sum is multiplied by a number made of
    its name. So the order of elements within a parameter does not count, which layouts change; values and names do.
    """
    params = ((item.param, tensor) for item, tensor in models.local_params() if not item.copy)
    total = torch.zeros(1, dtype=torch.int64, device=platform.current_device())
    for param, tensor in (*params, *extra):
        if is_first_replica(param, models.rank_context.coordinates):
            total += _sum(_true_rows(param, tensor, models)) * _name_factor(param.mca_name())
    torch.distributed.all_reduce(total)  # sums of integers wrap around
    return int(total)


def _true_rows(param: Param, tensor: Tensor, models: LiveModel) -> Tensor:
    """Return ``tensor`` without the padding of the vocabulary."""
    if not param.vocab:
        return tensor
    rank, _ = shard_rank_and_size(param, models.config.layout, models.rank_context.coordinates)
    return tensor[: max(models.config.vocab_size - rank * tensor.shape[0], 0)]


def _sum(tensor: Tensor) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).split(_STEP):
        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64, copy=True)
        for factor in _FACTORS:
            bits *= factor
            bits ^= bits >> _SHIFT
        total += bits.sum()
    return total


def _name_factor(name: str) -> int:
    """Return an odd number of 57 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little") << 1 | 1
