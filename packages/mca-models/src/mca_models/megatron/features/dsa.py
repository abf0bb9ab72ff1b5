"""DeepSeek Sparse Attention (DSA): MLA to the keys that an indexer chooses (DeepSeek V3.2, GLM 5)."""

from functools import cache

from torch import Tensor

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.mla import change_mla
from mca_models.megatron.features.topk_attention import (
    QueryFeatures,
    TopKSparseAttention,
    normed_input,
    recomputation_problems,
)
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.dsa_indexer import DsaIndexer, DsaSizes
from mca_models.megatron.layers.rope import attention_factor, frequencies
from mca_models.megatron.layers.zigzag import gather_full_sequences
from mca_models.megatron.types import MegatronConfig, MegatronModule


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
    problems=recomputation_problems,
    core_attention=dsa_attention,
)
