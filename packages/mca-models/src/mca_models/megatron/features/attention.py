"""Attention with clipped queries, keys and values, or with biases that differ from those of other linears."""

from functools import cache

from torch import Tensor

from mca_models.megatron.features.feature import Feature, change_self_attention
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
