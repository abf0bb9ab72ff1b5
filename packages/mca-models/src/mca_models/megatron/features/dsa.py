"""DeepSeek Sparse Attention (DSA): MLA to the keys that an indexer chooses (DeepSeek V3.2, GLM 5), in plain torch.

Axes of the indexer: n tokens of this rank, b batch, h heads, d their channels, q queries, k keys. As in transformers it
is not trained: its weights are buffers.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.mla import change_mla
from mca_models.megatron.features.topk_attention import (
    QueryFeatures,
    TopKSparseAttention,
    indexer_problems,
    normed_input,
    rotated,
)
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.rope import attention_factor, frequencies
from mca_models.megatron.layers.zigzag import gather_full_sequences
from mca_models.megatron.types import MegatronConfig, MegatronModule

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


class DsaAttention(TopKSparseAttention):
    """Core attention to the keys that its ``indexer`` chooses from the layer's input."""

    sizes: DsaSizes
    frequencies: Tensor
    factor: float

    def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[arg-type]
        self.indexer = DsaIndexer(self.sizes, self.frequencies, self.factor, config.params_dtype)
        self.hidden: Tensor | None = None
        self.compressed: Tensor | None = None

    def _index(self, lengths: tuple[int, ...]) -> tuple[QueryFeatures, list[Tensor]]:
        if self.hidden is None or self.compressed is None:
            raise RuntimeError("core attention was called without its layer")
        hidden, compressed = self.gather_sequence(self.hidden), self.gather_sequence(self.compressed)
        self.hidden = self.compressed = None
        positions = self.positions(lengths, hidden)
        keys = gather_full_sequences(self.indexer.keys(hidden, positions), lengths, self.cp_group)
        return (self.indexer.queries(compressed, positions), self.indexer.weights(hidden)), keys

    def _select(self, query_features: QueryFeatures, keys: Tensor, start: int) -> Tensor:
        queries, weights = query_features
        return self.indexer.select(queries, weights, keys, start).unsqueeze(1)


def dsa_attention(core: type[CoreAttention], config: McaModelConfig) -> type[CoreAttention]:
    """Return the core attention class of a model with an indexer."""
    dsa = given(config.dsa)
    sizes = DsaSizes(
        heads=dsa.index_num_heads or 1,
        channels=dsa.index_head_dim or 1,
        hidden=config.hidden_size,
        compressed=given(config.mla).q_lora_rank or 1,
        topk=dsa.index_topk,
        interleaved=dsa.index_rotary_interleaved,
    )
    rope = {"frequencies": frequencies(config), "factor": attention_factor(config)}
    return type("DsaAttention", (DsaAttention,), {"sizes": sizes, **rope})


@cache
def with_indexer(attention: type) -> type:
    """Return an MLA class that passes its inputs to its core attention."""

    class Indexed(attention):  # type: ignore[misc]
        """MLA with an indexer."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.linear_q_up_proj.register_forward_pre_hook(self._keep)

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> MegatronModule:
            """Save the input for the indexer, then call Megatron's attention."""
            self.core_attention.hidden = hidden_states
            return super().forward(hidden_states, *args, **kwargs)

        def _keep(self, linear: MegatronModule, args: tuple[Tensor, ...]) -> None:
            self.core_attention.compressed = normed_input(linear, args)

    return Indexed


DSA = Feature(
    name="DeepSeek sparse attention",
    enabled=lambda config: config.mla is not None and config.dsa is not None,
    spec=lambda context: change_mla(with_indexer),
    problems=indexer_problems,
    core_attention=dsa_attention,
)
