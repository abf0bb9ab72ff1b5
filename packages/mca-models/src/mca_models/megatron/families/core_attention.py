"""Which core attention a family needs that only ours computes: capped scores, chosen keys, ..."""

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.block_sparse_attention import block_attention
from mca_models.megatron.families.dsa import indexed_attention
from mca_models.megatron.layers.attention import CoreAttention, Special, special_attention


def own_core(config: McaModelConfig) -> type[CoreAttention] | None:
    """The class that computes it; None where any kernel does."""
    if (chosen := indexed_attention(config) or block_attention(config)) is not None:
        return chosen
    heat, skips = config.attn_temperature, config.no_rope_freq
    kinds = enumerate(config.layer_types or ())
    special = Special(
        softcap=config.attn_logit_softcapping,
        temperature=(heat["beta"], heat["length"], heat["first"]) if heat else None,
        heated=frozenset(layer for layer, skip in enumerate(skips) if skip) if heat and skips else None,
        chunk=config.attention_chunk_size,
        leaning=config.alibi,
        chunked=frozenset(
            layer for layer, kind in kinds if config.attention_chunk_size and kind == "chunked_attention"
        ),
    )
    if special != Special():
        return special_attention(special)
    return CoreAttention if any(own.value_width != own.kv_channels for own in config.kinds()) else None
