"""Attention heads that differ by layer, have values narrower than keys, or reuse keys as values."""

import copy
import dataclasses
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import (
    Context,
    Feature,
    LayerContext,
    SpecChanges,
    change_self_attention,
)
from mca_models.megatron.types import MegatronConfig, MegatronModule, Spec, Upstream

_BY_LAYER = ("num_query_groups", "kv_channels", "softmax_type", "softmax_scale")


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """Attention heads of one layer.

    Args:
        settings: Values of Megatron's settings in the order of ``_BY_LAYER``.
        values: Channels of a value head.
        values_are_keys: The values are the keys before their norm.
        norm: Epsilon of the values' norm; None: no norm.
        scale: Factor on values.
        reuses_kv: Uses keys and values of an earlier layer (see `shared_kv`).
        shares_kv: Later layers use this layer's keys and values.
        gate: A sigmoid gate multiplies the output of each head.
    """

    settings: tuple[object, ...]
    values: int
    values_are_keys: bool
    norm: float | None
    scale: float
    reuses_kv: bool
    shares_kv: bool
    gate: bool

    def group_rows(self, heads: int) -> list[int]:
        """Return the rows of ``linear_qkv`` for a group with ``heads`` queries, by what they project to.

        Queries come first, then keys, values, and one row for the gate of each head, as far as the layer has some.
        """
        width = cast(int, self.settings[_BY_LAYER.index("kv_channels")])
        shared = [] if self.reuses_kv else [width]
        if shared and not self.values_are_keys:
            shared.append(self.values)
        return [heads * width, *shared, *([heads] if self.gate else [])]


def heads_by_layer(config: McaModelConfig) -> tuple[HeadSettings, ...]:
    """Return the head settings of every decoder layer."""
    sources = {config.kv_source_layer(layer) for layer in range(config.num_layers)}
    return tuple(
        HeadSettings(
            settings=tuple(getattr(layer_config.attention, name) for name in _BY_LAYER),
            values=layer_config.attention.value_width,
            values_are_keys=layer_config.attention.values_are_keys,
            norm=layer_config.norm.layernorm_epsilon if layer_config.attention.value_norm else None,
            scale=layer_config.attention.value_scale,
            reuses_kv=layer_config.accepts_keys,
            shares_kv=layer in sources,
            gate=layer_config.attention.head_gate,
        )
        for layer, layer_config in enumerate(map(config.layer_config, range(config.num_layers)))
    )


class _SplitByHeads:
    """Methods of an attention that splits its QKV projection by ``heads``, the settings of its layer."""

    heads: HeadSettings
    shared_kv: tuple[Tensor, Tensor] | None
    reused_kv: tuple[Tensor, Tensor] | None
    gate: Tensor | None
    config: MegatronConfig
    num_attention_heads_per_partition: int
    num_query_groups_per_partition: int
    linear_qkv: Upstream
    q_layernorm: Upstream
    k_layernorm: Upstream

    def qkv_group_rows(self) -> list[int]:
        """Return the rows of ``linear_qkv`` for each group, by what they project to."""
        return self.heads.group_rows(
            self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ``[s, b, heads of this rank, channels]``."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.config.kv_channels
        if self.heads.reuses_kv:
            reused_kv, self.reused_kv = self.reused_kv, None
            assert reused_kv is not None
            return _normal(self.q_layernorm, mixed.unflatten(-1, (-1, width))), *reused_kv
        query, key, *others = torch.split(mixed.unflatten(-1, (groups, -1)), self.qkv_group_rows(), -1)
        self.gate = others.pop().flatten(-2) if self.heads.gate else None
        value = others[0] if others else key
        query = query.reshape(*query.shape[:2], -1, width)
        key, value = _normal(self.k_layernorm, key), _normalize_values(value, self.heads)
        self.shared_kv = (key, value) if self.heads.shares_kv else None
        return _normal(self.q_layernorm, query), key, value

    def _apply_gate(self, linear: MegatronModule, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Multiply the output of each head ``[s, b, heads * channels]`` by its gate."""
        gate, self.gate = self.gate, None
        assert gate is not None
        heads = args[0].unflatten(-1, (gate.shape[-1], -1))
        scaled = heads * gate.sigmoid().view(*heads.shape[:-1], 1)
        return scaled.flatten(-2), *args[1:]


@cache
def with_heterogeneous_heads(attention: type, by_layer: tuple[HeadSettings, ...]) -> type:
    """Return an attention class with the heads of its layer.

    Args:
        attention: Megatron's class.
        by_layer: The heads of each decoder layer.
    """

    class HeterogeneousHeads(_SplitByHeads, attention):  # type: ignore[misc]
        """Attention that splits its QKV projection by the layer's settings."""

        def __init__(
            self, config: MegatronConfig, submodules: Spec, layer_number: int, **kwargs: object
        ) -> None:
            heads, layer_config = by_layer[layer_number - 1], copy.copy(config)
            for name, value in zip(_BY_LAYER, heads.settings, strict=True):
                setattr(layer_config, name, value)
            groups = layer_config.num_query_groups
            rows = groups * sum(heads.group_rows(layer_config.num_attention_heads // groups))
            sized_submodules = dataclasses.replace(
                submodules,
                linear_qkv=sized(submodules.linear_qkv, rows=rows),
                linear_proj=sized(
                    submodules.linear_proj, columns=layer_config.num_attention_heads * heads.values
                ),
            )
            super().__init__(layer_config, submodules=sized_submodules, layer_number=layer_number, **kwargs)
            self.heads = heads
            self.shared_kv: tuple[Tensor, Tensor] | None = None
            self.reused_kv: tuple[Tensor, Tensor] | None = None
            self.gate: Tensor | None = None
            if heads.gate:
                self.linear_proj.register_forward_pre_hook(self._apply_gate)

    return HeterogeneousHeads


def _normalize_values(value: Tensor, heads: HeadSettings) -> Tensor:
    if heads.norm is not None:
        value = rms_norm(value.float(), value.shape[-1:], None, heads.norm).to(value.dtype)
    return value if heads.scale == 1.0 else value * heads.scale


def _normal(norm: MegatronModule | None, x: Tensor) -> Tensor:
    normal: Tensor = x if norm is None else norm(x)
    return normal


@cache
def sized(linear: type, *, rows: int | None = None, columns: int | None = None) -> type:
    """Return a linear class with fixed numbers of rows or columns."""

    class Sized(linear):  # type: ignore[misc]
        """Megatron's linear."""

        def __init__(self, input_size: int, output_size: int, **kwargs: object) -> None:
            super().__init__(columns or input_size, rows or output_size, **kwargs)

    return Sized


def _spec(context: Context) -> SpecChanges:
    by_layer = heads_by_layer(context.config)
    return change_self_attention(lambda attention: with_heterogeneous_heads(attention, by_layer))


HETEROGENEOUS_LAYERS = Feature(
    name="layers that differ",
    enabled=lambda config: len(config.kinds()) > 1,
    # tensors of layers that differ are not stacked
    settings=lambda config: {"hetereogenous_dist_checkpoint": True},
)
NARROW_VALUES = Feature(
    name="values narrower than keys",
    enabled=lambda config: any(
        kind.attention.value_width != kind.attention.kv_channels for kind in config.kinds()
    ),
    core_attention=lambda core, config: core,
)
HETEROGENEOUS_HEADS = Feature(
    name="heads that differ by layer or between keys and values",
    enabled=lambda config: config.has_custom_qkv,
    spec=_spec,
)


def _layer(context: LayerContext) -> SpecChanges:
    """Return the change of the MLP of layers with another width than most."""
    mlp = context.layer.mlp
    width = mlp.ffn_hidden_size
    if width == context.config.mlp.ffn_hidden_size:
        return SpecChanges()
    rows = width * (1 + mlp.gated_linear_unit)
    return SpecChanges(
        {
            "linear_fc1": lambda linear: sized(linear, rows=rows),
            "linear_fc2": lambda linear: sized(linear, columns=width),
        }
    )


HETEROGENEOUS_MLPS = Feature(
    name="MLPs that differ by layer",
    enabled=lambda config: any(
        kind.mlp.ffn_hidden_size != config.mlp.ffn_hidden_size for kind in config.kinds()
    ),
    layer=_layer,
)
