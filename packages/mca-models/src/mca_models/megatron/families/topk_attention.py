"""Core attention to the keys that an indexer chooses, in plain torch.

It is exact and not fast: every query's scores with all keys are computed, block by block, and those of keys that were
not chosen are thrown away. What an indexer looks at, and how it chooses, is in `sparse_attention` and
`block_sparse_attention`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.zigzag import rank_token_ranges

BLOCK = 128
"""Queries that are scored at a time."""

QueryFeatures = tuple[Tensor, ...]
"""What an indexer made of this rank's tokens, each tensor ``[tokens, ...]``."""


class TopKSparseAttention(CoreAttention):
    """Core attention whose queries see the keys that `_index` and `_select` choose."""

    def _index(self, lengths: tuple[int, ...]) -> tuple[QueryFeatures, list[Tensor]]:
        """What the indexer made of this rank's tokens, and its keys of whole sequences."""
        raise NotImplementedError

    def _select(self, query_features: QueryFeatures, keys: Tensor, start: int) -> Tensor:
        """Which keys queries see that stand from ``start`` on: ``[b, h, q, k]``, of equal shares of the heads."""
        raise NotImplementedError

    def gather_sequence(self, x: Tensor) -> Tensor:
        """``[tokens, b, channels]`` of this context rank, of all tensor ranks' shares."""
        x = x.detach() if x.dim() == 3 else x.detach().unsqueeze(1)
        if not self.config.sequence_parallel:
            return x
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        gathered: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        return gathered

    def positions(self, lengths: tuple[int, ...], like: Tensor) -> Tensor:
        """Where this rank's tokens stand in their sequences."""
        ranges = rank_token_ranges(lengths, self.cp_group.rank(), self.cp_group.size())
        parts = [torch.arange(each.start, each.start + each.length, device=like.device) for each in ranges]
        return torch.cat(parts)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ends: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            query_features, index_keys = self._index(lengths)
        keys, values = self._sequences(key, lengths), self._sequences(value, lengths)
        outputs, row = [], 0
        for chunk in rank_token_ranges(lengths, self.cp_group.rank(), self.cp_group.size()):
            for first in range(0, chunk.length, BLOCK):
                last = min(first + BLOCK, chunk.length)
                rows, stop = slice(row + first, row + last), chunk.start + last
                with (
                    self._draws()
                ):  # around the checkpoint, which restores the generator that draws, not the fork
                    out = checkpoint(  # so that no seq x seq is kept for the gradient
                        self._block,
                        query[rows],
                        keys[chunk.sequence][:stop],
                        values[chunk.sequence][:stop],
                        tuple(each[rows] for each in query_features),
                        index_keys[chunk.sequence][:stop],
                        chunk.start + first,
                        use_reentrant=False,
                        preserve_rng_state=self.dropout > 0,
                    )
                outputs.append(out)
            row += chunk.length
        return torch.cat(outputs)

    def _block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_features: QueryFeatures,
        index_keys: Tensor,
        start: int,
    ) -> Tensor:
        with torch.no_grad():
            seen = self._select(query_features, index_keys, start)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(~seen, -torch.inf)
        channels = value.shape[-1]
        width = max(query.shape[-1], channels)  # torch's kernels want equal sizes
        q, k, v = (pad(x, (0, width - x.shape[-1])).permute(1, 2, 0, 3) for x in (query, key, value))
        shares = (each.chunk(mask.shape[1], 1) for each in (q, k, v, mask))
        grouped, dropout = q.shape[1] != k.shape[1], self.dropout if self.training else 0.0
        outputs = [
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale, enable_gqa=grouped
            )
            for q, k, v, mask in zip(*shares, strict=True)
        ]
        return torch.cat(outputs, 1)[..., :channels].permute(2, 0, 1, 3)
