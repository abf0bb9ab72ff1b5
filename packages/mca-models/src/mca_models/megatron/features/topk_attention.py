"""Top-k sparse attention: core attention to the keys that an indexer chooses, in plain torch.

It is exact and not fast: it computes all scores of a block of queries and masks those of keys that were not chosen.
The indexers are used in `dsa` and `block_sparse_attention`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mca_models.megatron.features.feature import Setup
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.rope import LENGTH_DEPENDENT
from mca_models.megatron.layers.zigzag import gather_full_sequences, rank_token_ranges
from mca_models.megatron.types import MegatronModule

BLOCK = 128
"""Number of queries whose scores exist at a time."""

QueryFeatures = tuple[Tensor, ...]
"""Features of this rank's tokens from an indexer, each ``[tokens, ...]``."""


def normed_input(linear: MegatronModule, args: tuple[Tensor, ...]) -> Tensor:
    """Return the detached input of ``linear`` behind the norm that Transformer Engine fuses into it, if any."""
    hidden = args[0].detach()
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return hidden
    weight = weight.detach().float() + linear.zero_centered_gamma
    return rms_norm(hidden.float(), weight.shape, weight, linear.eps).to(hidden.dtype)


class TopKSparseAttention(CoreAttention):
    """Core attention to the keys that `_select` chooses from the features of `_index`."""

    def _index(self, lengths: tuple[int, ...]) -> tuple[QueryFeatures, list[Tensor]]:
        """Return the indexer's features of this rank's tokens, and its keys of full sequences."""
        raise NotImplementedError

    def _select(self, query_features: QueryFeatures, keys: Tensor, start: int) -> Tensor:
        """Return the mask ``[b, h, q, k]`` of the keys that queries from ``start`` on attend to."""
        raise NotImplementedError

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Return ``[tokens, b, channels]`` of this context rank, gathered over sequence-parallel ranks."""
        x = x.detach() if x.dim() == 3 else x.detach().unsqueeze(1)
        if not self.config.sequence_parallel:
            return x
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        gathered: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        return gathered

    def positions(self, lengths: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the positions of this rank's tokens in their sequences."""
        ranges = rank_token_ranges(lengths, self.cp_group.rank(), self.cp_group.size())
        parts = [torch.arange(each.start, each.start + each.length, device=like.device) for each in ranges]
        return torch.cat(parts)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ends: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            query_features, index_keys = self._index(lengths)
        keys, values = (gather_full_sequences(x, lengths, self.cp_group) for x in (key, value))
        outputs, row = [], 0
        for chunk in rank_token_ranges(lengths, self.cp_group.rank(), self.cp_group.size()):
            for first in range(0, chunk.length, BLOCK):
                last = min(first + BLOCK, chunk.length)
                rows, stop = slice(row + first, row + last), chunk.start + last
                # outside the checkpoint, which restores the generator, not the fork
                with self._draws():
                    out = checkpoint(  # saves no seq x seq tensor for the backward pass
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
            selected = self._select(query_features, index_keys, start)
            mask = torch.zeros(selected.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(~selected, -torch.inf)
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


def indexer_problems(setup: Setup) -> Iterator[str]:
    """Yield what an indexer cannot do: read inputs that are gone, and follow frequencies of the longest sequence."""
    if setup.recomputes("core_attn"):
        yield (
            "top-k attention cannot be recomputed alone; remove core_attn from "
            "recompute_modules, or set recompute_granularity to full"
        )
    kind = (setup.config.rope.rope_scaling or {}).get("rope_type")
    if kind in LENGTH_DEPENDENT:
        yield f"top-k attention with rope_type {kind} is not supported; use one that does not depend on the length"
