"""Attention with options that Megatron lacks: of its core attention, clipped projections, and separate biases."""

import dataclasses
from functools import cache

from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.feature import Feature, change_self_attention
from mca_models.megatron.layers.attention import CoreAttention, attention_with_options
from mca_models.megatron.types import MegatronConfig


@cache
def with_clipped_qkv(attention: type, size: float) -> type:
    """Return an attention class that clips queries, keys and values to ``size``, after their norms, before RoPE."""

    class ClippedQkv(attention):  # type: ignore[misc]
        """Megatron's attention."""

        def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
            """Queries, keys, values, and a gate if there is one."""
            query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
            return *(x.clamp(-size, size) for x in (query, key, value)), *gate

    return ClippedQkv


@cache
def with_biases(attention: type, *, biased: bool) -> type:
    """Return an attention class whose linears have biases or none, independent of the MLP's."""

    class AttentionBiases(attention):  # type: ignore[misc]
        """Megatron's attention."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            before, config.add_bias_linear = config.add_bias_linear, biased
            super().__init__(config, *args, **kwargs)
            config.add_bias_linear = before

    return AttentionBiases


Core = type[CoreAttention]


def _with_options(core: Core, **options: Typed) -> Core:
    return attention_with_options(dataclasses.replace(core.options, **options))


def _with_temperature(core: Core, config: McaModelConfig) -> Core:
    temperature, skips = config.attention.attn_temperature or {}, config.rope.no_rope_freq
    without_rope = frozenset(layer for layer, skip in enumerate(skips or ()) if skip)
    return _with_options(
        core,
        temperature=(temperature["beta"], temperature["length"], temperature["first"]),
        temperature_layers=without_rope if skips else None,
    )


def _with_chunks(core: Core, config: McaModelConfig) -> Core:
    kinds = enumerate(config.layer_types or ())
    chunked = frozenset(layer for layer, kind in kinds if kind == "chunked_attention")
    size = config.attention.attention_chunk_size
    return _with_options(core, chunk=size, chunked_layers=chunked if size else frozenset())


SOFTCAP = Feature(
    name="capped attention scores",
    enabled=lambda config: config.attention.attn_logit_softcapping is not None,
    core_attention=lambda core, config: _with_options(core, softcap=config.attention.attn_logit_softcapping),
)
QUERY_TEMPERATURE = Feature(
    name="query temperature",
    enabled=lambda config: bool(config.attention.attn_temperature),
    core_attention=_with_temperature,
)
CHUNKED_ATTENTION = Feature(
    name="attention within chunks",
    enabled=lambda config: config.attention.attention_chunk_size is not None,
    core_attention=_with_chunks,
)
ALIBI = Feature(
    name="ALiBi",
    enabled=lambda config: config.attention.alibi,
    core_attention=lambda core, config: _with_options(core, alibi=True),
    position_embedding="none",
)
CLIPPED_QKV = Feature(
    name="clipped queries, keys and values",
    enabled=lambda config: config.attention.clip_qkv is not None,
    spec=lambda context: change_self_attention(
        lambda attention: with_clipped_qkv(attention, context.config.attention.clip_qkv or 0.0)
    ),
)
ATTENTION_BIASES = Feature(
    name="biases of attention",
    enabled=lambda config: config.attention.add_bias_attention is not None,
    spec=lambda context: change_self_attention(
        lambda attention: with_biases(attention, biased=bool(context.config.attention.add_bias_attention))
    ),
)
