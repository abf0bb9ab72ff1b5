"""Latent attention to the keys that an indexer chooses (DeepSeek V3.2, GLM 5), in plain torch.

It is exact and not fast: every query's scores with all keys are computed, block by block, and those of keys that were
not chosen are thrown away.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.indexer import Indexer, IndexSizes
from mca_models.megatron.layers.rope import attention_factor, frequencies
from mca_models.megatron.layers.zigzag import ranges_of_rank
from mca_models.megatron.types import MegatronConfig, MegatronModule

BLOCK = 128
"""Queries that are scored at a time."""


class IndexedAttention(CoreAttention):
    """Core attention whose queries see the keys that its ``indexer`` chooses, by what the layer was given."""

    sizes: IndexSizes
    frequencies: Tensor
    factor: float

    def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[arg-type]
        self.indexer = Indexer(self.sizes, self.frequencies, self.factor, config.params_dtype)
        self.hidden: Tensor | None = None
        self.compressed: Tensor | None = None

    def whole(self, x: Tensor) -> Tensor:
        """``[tokens, b, channels]`` of this context rank, of all tensor ranks' shares."""
        x = x.detach() if x.dim() == 3 else x.detach().unsqueeze(1)
        if not self.config.sequence_parallel:
            return x
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        gathered: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        return gathered

    @torch.no_grad()
    def _index(self, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The indexer's queries and weights of this rank's tokens, and its keys of whole sequences."""
        if self.hidden is None or self.compressed is None:
            raise RuntimeError("core attention was called without its layer")
        hidden, compressed = self.whole(self.hidden), self.whole(self.compressed)
        self.hidden = self.compressed = None
        ranges = ranges_of_rank(lengths, self.cp_group.rank(), self.cp_group.size())
        places = torch.cat([torch.arange(each.start, each.start + each.length) for each in ranges])
        places = places.to(hidden.device)
        keys = self._sequences(self.indexer.keys(hidden, places), lengths)
        return self.indexer.queries(compressed, places), self.indexer.weights(hidden), keys

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ends: Tensor | None
    ) -> Tensor:
        index_queries, weights, index_keys = self._index(lengths)
        keys, values = self._sequences(key, lengths), self._sequences(value, lengths)
        outputs, row = [], 0
        for chunk in ranges_of_rank(lengths, self.cp_group.rank(), self.cp_group.size()):
            for first in range(0, chunk.length, BLOCK):
                last = min(first + BLOCK, chunk.length)
                rows, stop = slice(row + first, row + last), chunk.start + last
                outputs.append(
                    checkpoint(  # so that no seq x seq is kept for the gradient
                        self._block,
                        query[rows],
                        keys[chunk.sequence][:stop],
                        values[chunk.sequence][:stop],
                        (index_queries[rows], weights[rows], index_keys[chunk.sequence][:stop]),
                        chunk.start + first,
                        use_reentrant=False,
                        preserve_rng_state=self.dropout > 0,
                    )
                )
            row += chunk.length
        return torch.cat(outputs)

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, index: tuple[Tensor, Tensor, Tensor], start: int
    ) -> Tensor:
        with torch.no_grad():
            seen = self.indexer.chosen(*index, start).unsqueeze(1)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(~seen, -torch.inf)
        channels = value.shape[-1]
        width = max(query.shape[-1], channels)  # torch's kernels want equal sizes
        q, k, v = (pad(x, (0, width - x.shape[-1])).permute(1, 2, 0, 3) for x in (query, key, value))
        with self._draws():
            dropout = self.dropout if self.training else 0.0
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale)
        return out[..., :channels].permute(2, 0, 1, 3)


def indexed_attention(config: McaModelConfig) -> type[IndexedAttention] | None:
    """The core attention of a model with an indexer; None: it has none."""
    if not isinstance(config, MlaMcaModelConfig) or config.index_topk is None:
        return None
    sizes = IndexSizes(
        heads=config.index_num_heads or 1,
        channels=config.index_head_dim or 1,
        hidden=config.hidden_size,
        compressed=config.q_lora_rank or 1,
        topk=config.index_topk,
        interleaved=config.index_rotary_interleaved,
    )
    rope = {"frequencies": frequencies(config), "factor": attention_factor(config)}
    return type("IndexedAttention", (IndexedAttention,), {"sizes": sizes, **rope})


@cache
def with_indexer(attention: type) -> type:
    """Megatron's latent attention that passes its inputs on to its core attention."""

    class Indexed(attention):  # type: ignore[misc]
        """Latent attention."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.linear_q_up_proj.register_forward_pre_hook(self._keep)

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> MegatronModule:
            """See Megatron's attention."""
            self.core_attention.hidden = hidden_states
            return super().forward(hidden_states, *args, **kwargs)

        def _keep(self, linear: MegatronModule, args: tuple[Tensor, ...]) -> None:
            compressed = args[0].detach()
            inside = getattr(linear, "layer_norm_weight", None)  # Transformer Engine's has the norm inside
            if inside is not None:
                normal = rms_norm(compressed.float(), inside.shape, inside.detach().float(), linear.eps)
                compressed = normal.to(compressed.dtype)
            self.core_attention.compressed = compressed

    return Indexed
