"""Shared KV: late layers reuse the keys and values of an earlier layer (Gemma 4 E2B, E4B).

They are passed as the block's ``context``, ``[s, b, channels of all shared layers]``, which Megatron passes from
layer to layer and through recomputation. Keys are passed before RoPE; a layer that reuses them rotates them again.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.megatron.features.feature import Feature, LayerContext, SpecChanges, remove_module
from mca_models.megatron.types import GptModel, MegatronModule

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class ContextSlice:
    """Channels of one layer's keys and values in a context, on this tensor rank.

    Args:
        start: First channel.
        keys: Channels of all key heads.
        values: Channels of all value heads.
        groups: Number of heads.
    """

    start: int
    keys: int
    values: int
    groups: int

    def read(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``[s, b, heads, channels]``."""
        both = context.narrow(-1, self.start, self.keys + self.values)
        key, value = both.split([self.keys, self.values], -1)
        return key.unflatten(-1, (self.groups, -1)), value.unflatten(-1, (self.groups, -1))


def share_kv(model: GptModel, config: McaModelConfig) -> None:
    """Make the layers of a chunk share and reuse keys and values."""
    slices = _slices(config)
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        if number in slices:
            layer.register_forward_hook(_share)
        source = config.kv_source_layer(number)
        if source is not None:
            layer.register_forward_pre_hook(partial(_reuse, slices[source]), with_kwargs=True)


def _slices(config: McaModelConfig) -> dict[int, ContextSlice]:
    """Return the slice of each layer that shares, by its number, in order."""
    sources = {config.kv_source_layer(layer) for layer in range(config.num_layers)} - {None}
    slices: dict[int, ContextSlice] = {}
    start = 0
    for layer in sorted(source for source in sources if source is not None):
        layer_config = config.layer_config(layer)
        groups = layer_config.attention.num_query_groups // config.layout.tp
        slices[layer] = ContextSlice(
            start,
            groups * layer_config.attention.kv_channels,
            groups * layer_config.attention.value_width,
            groups,
        )
        start += groups * (layer_config.attention.kv_channels + layer_config.attention.value_width)
    return slices


def _share(
    layer: MegatronModule, args: Arguments, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    hidden, context = output
    attention = layer.self_attention
    shared_kv = torch.cat([part.flatten(2) for part in attention.shared_kv], -1)
    attention.shared_kv = None
    return hidden, shared_kv if context is None else torch.cat([context, shared_kv], -1)


def _reuse(source: ContextSlice, layer: MegatronModule, args: Arguments, kwargs: JsonObject) -> None:
    layer.self_attention.reused_kv = source.read(kwargs["context"])


def _layer(context: LayerContext) -> SpecChanges:
    """Remove the key norm of layers that reuse keys and values."""
    return SpecChanges({"k_layernorm": remove_module} if context.layer.accepts_keys else {})


SHARED_KV = Feature(
    name="shared KV", enabled=lambda config: config.shared_kv is not None, layer=_layer, finish=share_kv
)
