"""Block-sparse attention to the key blocks that an indexer chooses for each group of heads (MiniMax M3)."""

from functools import cache

from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature, change_self_attention
from mca_models.megatron.features.topk_attention import (
    QueryFeatures,
    TopKSparseAttention,
    recomputation_problems,
)
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.block_indexer import BlockIndexer, BlockSizes
from mca_models.megatron.layers.rope import attention_factor, frequencies
from mca_models.megatron.types import MegatronConfig, MegatronModule


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
        keys = self._sequences(self.indexer.keys(hidden, positions), lengths)
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
            hidden = args[0].detach()
            weight = getattr(linear, "layer_norm_weight", None)  # Transformer Engine fuses the norm
            if weight is not None:
                weight = weight.detach().float() + linear.zero_centered_gamma
                hidden = rms_norm(hidden.float(), weight.shape, weight, linear.eps).to(hidden.dtype)
            self.core_attention.hidden = hidden

    return Indexed


BLOCK_SPARSE_ATTENTION = Feature(
    name="block-sparse attention",
    enabled=lambda config: config.block_sparse_attention is not None,
    spec=lambda context: change_self_attention(with_block_indexer),
    problems=recomputation_problems,
    core_attention=block_sparse_attention,
)
