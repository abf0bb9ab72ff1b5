"""Choice of mca's core attention for models whose attention no kernel computes: capped scores, top-k, ALiBi, ..."""

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.block_sparse_attention import block_sparse_attention
from mca_models.megatron.features.dsa import dsa_attention
from mca_models.megatron.layers.attention import AttentionOptions, CoreAttention, attention_with_options


def custom_core_attention(config: McaModelConfig) -> type[CoreAttention] | None:
    """Return the core attention class that the model needs; None if any kernel computes it."""
    if (chosen := dsa_attention(config) or block_sparse_attention(config)) is not None:
        return chosen
    temperature, skips = config.attention.attn_temperature, config.rope.no_rope_freq
    kinds = enumerate(config.layer_types or ())
    without_rope = frozenset(layer for layer, skip in enumerate(skips or ()) if skip)
    options = AttentionOptions(
        softcap=config.attention.attn_logit_softcapping,
        temperature=(temperature["beta"], temperature["length"], temperature["first"])
        if temperature
        else None,
        temperature_layers=without_rope if temperature and skips else None,
        chunk=config.attention.attention_chunk_size,
        alibi=config.attention.alibi,
        chunked_layers=frozenset(
            layer
            for layer, kind in kinds
            if config.attention.attention_chunk_size and kind == "chunked_attention"
        ),
    )
    if options != AttentionOptions():
        return attention_with_options(options)
    return (
        CoreAttention
        if any(kind.attention.value_width != kind.attention.kv_channels for kind in config.kinds())
        else None
    )
