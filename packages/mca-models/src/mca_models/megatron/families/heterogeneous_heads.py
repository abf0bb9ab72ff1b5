"""Attention with other heads than Megatron's: by kind of layer, values narrower than keys, or made of the keys."""

import copy
import dataclasses
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import MegatronConfig, MegatronModule, Spec

_BY_LAYER = ("num_query_groups", "kv_channels", "softmax_type", "softmax_scale")


@dataclasses.dataclass(frozen=True)
class Heads:
    """What one layer's attention makes of its input.

    Args:
        settings: Of Megatron's configuration, in the order of ``_BY_LAYER``.
        values: Channels of a head's values.
        keys_again: The values are the keys before their norm.
        norm: The epsilon of the values' norm; None: they have none.
        scale: Factor on values.
        takes: Keys and values are another layer's (see `shared_keys`).
        lends: They are another layer's too.
    """

    settings: tuple[object, ...]
    values: int
    keys_again: bool
    norm: float | None
    scale: float
    takes: bool
    lends: bool


def heads_by_layer(config: McaModelConfig) -> tuple[Heads, ...]:
    """Those of every decoder layer."""
    sources = {config.keys_from(layer) for layer in range(config.num_layers)}
    return tuple(
        Heads(
            settings=tuple(getattr(own, name) for name in _BY_LAYER),
            values=own.value_width,
            keys_again=own.values_are_keys,
            norm=own.layernorm_epsilon if own.value_norm else None,
            scale=own.value_scale,
            takes=own.takes_keys,
            lends=layer in sources,
        )
        for layer, own in enumerate(map(config.of_layer, range(config.num_layers)))
    )


@cache
def with_own_heads(attention: type, by_layer: tuple[Heads, ...]) -> type:
    """An attention class with the heads of its layer.

    Args:
        attention: Megatron's class.
        by_layer: The heads of each decoder layer.
    """

    class OwnHeads(attention):  # type: ignore[misc]
        """Attention that splits its projection by itself."""

        def __init__(
            self, config: MegatronConfig, submodules: Spec, layer_number: int, **kwargs: object
        ) -> None:
            heads, own = by_layer[layer_number - 1], copy.copy(config)
            for name, value in zip(_BY_LAYER, heads.settings, strict=True):
                setattr(own, name, value)
            queries = own.num_attention_heads * own.kv_channels
            shared = own.num_query_groups * (own.kv_channels + (0 if heads.keys_again else heads.values))
            if heads.takes:
                shared = 0
            sized_submodules = dataclasses.replace(
                submodules,
                linear_qkv=sized(submodules.linear_qkv, rows=queries + shared),
                linear_proj=sized(submodules.linear_proj, columns=own.num_attention_heads * heads.values),
            )
            super().__init__(own, submodules=sized_submodules, layer_number=layer_number, **kwargs)
            self.heads = heads
            self.lent: tuple[Tensor, Tensor] | None = None
            self.taken: tuple[Tensor, Tensor] | None = None

        def rows_of_group(self) -> list[int]:
            """Rows of ``linear_qkv`` that are the queries, keys and values of each group; one number: queries alone."""
            width = self.config.kv_channels
            queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition * width
            if self.heads.takes:
                return [queries]
            return [queries, width] if self.heads.keys_again else [queries, width, self.heads.values]

        def get_query_key_value_tensors(
            self, hidden_states: Tensor, *args: object, **kwargs: object
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Queries, keys and values, ``[s, b, heads of this rank, channels]``."""
            mixed, _ = self.linear_qkv(hidden_states)
            groups, width = self.num_query_groups_per_partition, self.config.kv_channels
            if self.heads.takes:
                taken, self.taken = self.taken, None
                assert taken is not None
                return _normal(self.q_layernorm, mixed.unflatten(-1, (-1, width))), *taken
            query, key, *own = torch.split(mixed.unflatten(-1, (groups, -1)), self.rows_of_group(), -1)
            value = own[0] if own else key
            query = query.reshape(*query.shape[:2], -1, width)
            key, value = _normal(self.k_layernorm, key), _valued(value, self.heads)
            self.lent = (key, value) if self.heads.lends else None
            return _normal(self.q_layernorm, query), key, value

    return OwnHeads


def _valued(value: Tensor, heads: Heads) -> Tensor:
    if heads.norm is not None:
        value = rms_norm(value.float(), value.shape[-1:], None, heads.norm).to(value.dtype)
    return value if heads.scale == 1.0 else value * heads.scale


def _normal(norm: MegatronModule | None, x: Tensor) -> Tensor:
    normal: Tensor = x if norm is None else norm(x)
    return normal


@cache
def sized(linear: type, *, rows: int | None = None, columns: int | None = None) -> type:
    """A linear's class with so many rows or columns, whatever it is asked for."""

    class Sized(linear):  # type: ignore[misc]
        """Megatron's linear."""

        def __init__(self, input_size: int, output_size: int, **kwargs: object) -> None:
            super().__init__(columns or input_size, rows or output_size, **kwargs)

    return Sized
