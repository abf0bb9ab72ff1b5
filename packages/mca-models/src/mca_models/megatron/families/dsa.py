"""Latent attention to the keys that an indexer chooses one by one (DeepSeek V3.2, GLM 5)."""

from functools import cache

from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_models.megatron.families.topk_attention import ChosenKeys, OfQueries
from mca_models.megatron.layers.dsa_indexer import Indexer, IndexSizes
from mca_models.megatron.layers.rope import attention_factor, frequencies
from mca_models.megatron.types import MegatronConfig, MegatronModule


class IndexedAttention(ChosenKeys):
    """Core attention whose queries see the keys that its ``indexer`` chooses, by what the layer was given."""

    sizes: IndexSizes
    frequencies: Tensor
    factor: float

    def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[arg-type]
        self.indexer = Indexer(self.sizes, self.frequencies, self.factor, config.params_dtype)
        self.hidden: Tensor | None = None
        self.compressed: Tensor | None = None

    def _index(self, lengths: tuple[int, ...]) -> tuple[OfQueries, list[Tensor]]:
        if self.hidden is None or self.compressed is None:
            raise RuntimeError("core attention was called without its layer")
        hidden, compressed = self.whole(self.hidden), self.whole(self.compressed)
        self.hidden = self.compressed = None
        places = self.places(lengths, hidden)
        keys = self._sequences(self.indexer.keys(hidden, places), lengths)
        return (self.indexer.queries(compressed, places), self.indexer.weights(hidden)), keys

    def _chosen(self, of_queries: OfQueries, keys: Tensor, start: int) -> Tensor:
        queries, weights = of_queries
        return self.indexer.chosen(queries, weights, keys, start).unsqueeze(1)


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
