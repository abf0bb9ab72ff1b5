"""Indexer of DeepSeek Sparse Attention (DeepSeek V3.2, GLM 5), in plain torch.

Axes: n tokens of this rank, b batch, h heads of the indexer, d their channels, q queries, k keys. As in transformers it
is not trained: its weights are buffers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

_EPSILON = 1e-6


@dataclass(frozen=True)
class DsaSizes:
    """Sizes of an indexer.

    Args:
        heads: Number of heads.
        channels: Channels of a head.
        hidden: Channels of the layer's input.
        compressed: Channels of the compressed queries.
        topk: Keys chosen for a query.
        interleaved: Rotate neighbouring channels as pairs; else channels half the rotated width apart.
    """

    heads: int
    channels: int
    hidden: int
    compressed: int
    topk: int
    interleaved: bool


class DsaIndexer(torch.nn.Module):
    """Score of each key for each query: the weighted sum over heads of the ReLU of their products."""

    wq_b: Tensor
    wk: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor
    inverse_frequencies: Tensor

    def __init__(self, sizes: DsaSizes, frequencies: Tensor, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.factor = sizes, factor
        shapes = {
            "wq_b": (sizes.heads * sizes.channels, sizes.compressed),
            "wk": (sizes.channels, sizes.hidden),
            "k_norm_weight": (sizes.channels,),
            "k_norm_bias": (sizes.channels,),
            "weights_proj": (sizes.heads, sizes.hidden),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def queries(self, compressed: Tensor, positions: Tensor) -> Tensor:
        """Compute ``[n, b, h, d]`` from compressed queries ``[n, b, r]`` at ``positions`` ``[n]``."""
        return self._rotated(linear(compressed, self.wq_b).unflatten(-1, (self.sizes.heads, -1)), positions)

    def keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Compute ``[n, b, d]`` from the layer's input ``[n, b, hidden]``."""
        keys = linear(hidden, self.wk).float()
        normal = layer_norm(
            keys, keys.shape[-1:], self.k_norm_weight.float(), self.k_norm_bias.float(), _EPSILON
        )
        return self._rotated(normal.to(hidden.dtype).unsqueeze(2), positions).squeeze(2)

    def weights(self, hidden: Tensor) -> Tensor:
        """Compute the heads' weights ``[n, b, h]``, fp32."""
        factor: float = (self.sizes.heads * self.sizes.channels) ** -0.5
        return linear(hidden, self.weights_proj).float() * factor

    def select(self, queries: Tensor, weights: Tensor, keys: Tensor, start: int) -> Tensor:
        """Return the mask ``[b, q, k]`` of the topk keys at or before each query.

        Args:
            queries: ``[q, b, h, d]``, the first at position ``start``.
            weights: ``[q, b, h]``.
            keys: ``[k, b, d]``, positions from 0.
            start: Position of the first query.
        """
        products: Tensor = torch.einsum("qbhd,kbd->bqhk", queries.float(), keys.float()).relu()
        scores: Tensor = torch.einsum("bqhk,qbh->bqk", products, weights)
        positions = torch.arange(start, start + len(queries), device=keys.device)
        visible = torch.arange(len(keys), device=keys.device) <= positions[:, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        best = scores.topk(min(self.sizes.topk, len(keys)), -1).indices
        mask: Tensor = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible
        return mask

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first channels of ``[n, b, h, d]``."""
        frequencies = self.inverse_frequencies
        return rotated(x, positions, frequencies, self.factor, interleaved=self.sizes.interleaved)


def rotated(
    x: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float, *, interleaved: bool = False
) -> Tensor:
    """Rotate the first channels of ``x`` ``[n, b, h, d]`` at ``positions`` ``[n]``, in neighbouring pairs or halves."""
    angles = torch.outer(positions.float(), inverse_frequencies)[:, None, None]
    cos, sin = ((f(angles) * factor).to(x.dtype) for f in (torch.cos, torch.sin))
    width = 2 * inverse_frequencies.numel()
    rotary, rest = x[..., :width], x[..., width:]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
