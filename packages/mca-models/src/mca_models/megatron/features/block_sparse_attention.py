"""Block-sparse attention to the key blocks that an indexer chooses for each group of heads (MiniMax M3)."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature, change_self_attention
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


class BlockSparseAttention(TopKSparseAttention):
    """Core attention that, in sparse layers, attends to the keys its ``indexer`` chooses from the layer's input."""

    sizes: BlockSizes
    frequencies: Tensor
    factor: float
    sparse: frozenset[int]

    def __init__(self, config: MegatronConfig, layer_number: int, *args: object, **kwargs: object) -> None:
        super().__init__(config, layer_number, *args, **kwargs)  # type: ignore[arg-type]
        self.indexer: BlockIndexer | None = None
        if layer_number - 1 in self.sparse:
            self.indexer = BlockIndexer(self.sizes, self.frequencies, self.factor, config.params_dtype)
        self.heads_of_group = config.num_attention_heads // self.sizes.groups
        self.hidden: Tensor | None = None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ends: Tensor | None
    ) -> Tensor:
        if self.indexer is None:
            return CoreAttention._attend(self, query, key, value, lengths, ends)
        return super()._attend(query, key, value, lengths, ends)

    def _index(self, lengths: tuple[int, ...]) -> tuple[QueryFeatures, list[Tensor]]:
        if self.hidden is None or self.indexer is None:
            raise RuntimeError("core attention was called without its layer")
        hidden, self.hidden = self.gather_sequence(self.hidden), None
        positions = self.positions(lengths, hidden)
        keys = gather_full_sequences(self.indexer.keys(hidden, positions), lengths, self.cp_group)
        return (self.indexer.queries(hidden, positions, self._groups()),), keys

    def _select(self, query_features: QueryFeatures, keys: Tensor, start: int) -> Tensor:
        assert self.indexer is not None
        (queries,) = query_features
        return self.indexer.select(queries, keys, start)

    def _groups(self) -> slice:
        """Return the groups of this tensor rank's heads."""
        from megatron.core import parallel_state

        share = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        first = parallel_state.get_tensor_model_parallel_rank() * share
        return slice(first // self.heads_of_group, -(-(first + share) // self.heads_of_group))


def block_sparse_attention(core: type[CoreAttention], config: McaModelConfig) -> type[CoreAttention]:
    """Return the core attention class of a model with a block indexer."""
    blocks = given(config.block_sparse_attention).index_blocks
    sizes = BlockSizes(
        groups=config.attention.num_query_groups,
        channels=blocks["channels"],
        hidden=config.hidden_size,
        size=blocks["size"],
        topk=blocks["topk"],
        local=blocks["local"],
        epsilon=config.norm.layernorm_epsilon,
        offset=1.0 if config.norm.layernorm_zero_centered_gamma else 0.0,
    )
    kinds = enumerate(config.layer_types or ())
    attributes = {
        "sizes": sizes,
        "frequencies": frequencies(config),
        "factor": attention_factor(config),
        "sparse": frozenset(layer for layer, kind in kinds if kind == "sparse_attention"),
    }
    return type("BlockSparseAttention", (BlockSparseAttention,), attributes)


@cache
def with_block_indexer(attention: type) -> type:
    """Return an attention class that passes its input to its core attention."""

    class Indexed(attention):  # type: ignore[misc]
        """Attention."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            if self.core_attention.indexer is not None:
                self.linear_qkv.register_forward_pre_hook(self._keep)

        def _keep(self, linear: MegatronModule, args: tuple[Tensor, ...]) -> None:
            self.core_attention.hidden = normed_input(linear, args)

    return Indexed


BLOCK_SPARSE_ATTENTION = Feature(
    name="block-sparse attention",
    enabled=lambda config: config.block_sparse_attention is not None,
    spec=lambda context: change_self_attention(with_block_indexer),
    problems=indexer_problems,
    core_attention=block_sparse_attention,
)
