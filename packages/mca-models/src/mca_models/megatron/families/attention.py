"""Attention whose queries, keys and values are clipped, or whose linears have biases where others have none."""

from functools import cache

from torch import Tensor

from mca_models.megatron.types import MegatronConfig


@cache
def with_clipped_qkv(attention: type, size: float) -> type:
    """An attention class whose queries, keys and values are clipped to ``size``, after their norms, before the rope."""

    class ClippedQkv(attention):  # type: ignore[misc]
        """Megatron's attention."""

        def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
            """Queries, keys, values, and a gate if there is one."""
            query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
            return *(x.clamp(-size, size) for x in (query, key, value)), *gate

    return ClippedQkv


@cache
def with_biases(attention: type, *, biased: bool) -> type:
    """An attention class whose linears have biases or none, whatever those of the MLP have."""

    class AttentionBiases(attention):  # type: ignore[misc]
        """Megatron's attention."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            before, config.add_bias_linear = config.add_bias_linear, biased
            super().__init__(config, *args, **kwargs)
            config.add_bias_linear = before

    return AttentionBiases
