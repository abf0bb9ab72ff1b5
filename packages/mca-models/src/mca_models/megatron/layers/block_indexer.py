"""Indexer that chooses blocks of keys for each group of heads (MiniMax M3), in plain torch.

Axes: n tokens of this rank, b batch, g groups of heads, d channels, q queries, k keys. As in transformers it is not
trained: its weights are buffers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm

from mca_models.megatron.layers.dsa_indexer import rotated


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block indexer.

    Args:
        groups: Groups of heads, each with one query of the indexer.
        channels: Channels of a query.
        hidden: Channels of the layer's input.
        size: Keys per block.
        topk: Blocks chosen for a query.
        local: Number of those that are always chosen: the query's own block and the ones before it.
        epsilon: Epsilon of the norms.
        offset: Offset of the norms' weights (1 if zero-centered).
    """

    groups: int
    channels: int
    hidden: int
    size: int
    topk: int
    local: int
    epsilon: float
    offset: float


class _Weight(torch.nn.Module):
    """Module with a weight that is not trained."""

    weight: Tensor

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(shape, dtype=dtype))


class BlockIndexer(torch.nn.Module):
    """Score of each key block for each group's query: that of its best key."""

    inverse_frequencies: Tensor

    def __init__(self, sizes: BlockSizes, frequencies: Tensor, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.factor = sizes, factor
        self.q_proj = _Weight(sizes.groups * sizes.channels, sizes.hidden, dtype=dtype)
        self.k_proj = _Weight(sizes.channels, sizes.hidden, dtype=dtype)
        self.q_norm, self.k_norm = (_Weight(sizes.channels, dtype=dtype) for _ in range(2))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def queries(self, hidden: Tensor, positions: Tensor, groups: slice) -> Tensor:
        """Compute ``[n, b, g, d]`` of ``groups`` from the layer's input ``[n, b, hidden]`` at ``positions`` ``[n]``."""
        weight = self.q_proj.weight.unflatten(0, (self.sizes.groups, -1))[groups].flatten(0, 1)
        return self._project(hidden, positions, weight, self.q_norm.weight)

    def keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Compute ``[n, b, d]`` from the layer's input."""
        return self._project(hidden, positions, self.k_proj.weight, self.k_norm.weight).squeeze(2)

    def _project(self, hidden: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
        heads = linear(hidden, weight).unflatten(-1, (-1, self.sizes.channels))
        scale = norm.float() + self.sizes.offset
        normal = rms_norm(heads.float(), scale.shape, scale, self.sizes.epsilon).to(heads.dtype)
        return rotated(normal, positions, self.inverse_frequencies, self.factor)

    def select(self, queries: Tensor, keys: Tensor, start: int) -> Tensor:
        """Return the mask ``[b, g, q, k]`` of keys before each query in its own and in the best blocks.

        Args:
            queries: ``[q, b, g, d]``, at positions from ``start`` on.
            keys: ``[k, b, d]``, of the whole sequence up to the last query.
            start: Position of the first query.
        """
        size, count = self.sizes.size, -(-len(keys) // self.sizes.size)
        scores: Tensor = torch.einsum("qbgd,kbd->bgqk", queries.float(), keys.float())
        positions = torch.arange(start, start + len(queries), device=keys.device)
        before = torch.arange(len(keys), device=keys.device) <= positions[:, None]
        scores = pad(scores.masked_fill(~before, -torch.inf), (0, count * size - len(keys)), value=-torch.inf)
        blocks = scores.unflatten(-1, (count, size)).amax(-1)
        nearest = positions[:, None] // size - torch.arange(self.sizes.local, device=keys.device)
        blocks.scatter_(-1, nearest.clamp(min=0).expand(*blocks.shape[:2], -1, -1), torch.inf)
        best = blocks.topk(min(self.sizes.topk, count), -1).indices
        mask = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, True)
        return mask.repeat_interleave(size, -1)[..., : len(keys)] & before
