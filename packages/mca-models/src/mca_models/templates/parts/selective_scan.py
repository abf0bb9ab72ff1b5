"""Rules and costs of Mamba 1 layers.

`mca_models.megatron.features.selective_scan` computes these layers.
"""

import math
from collections.abc import Iterator

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import Field, HfConfig, Lens
from mca_models.templates.parts.common import attention, inner
from mca_models.templates.parts.gated_delta_net import fused
from mca_models.templates.parts.layer_costs import CHUNK, SINGLE, LayerSizes, MixerCosts, SavedTensor
from mca_models.weights import COLUMN, ROW, Param, expand_rules

FIELDS = (
    Field("scan_state_dim", "mamba_d_state", 16),
    Field("scan_conv_kernel_dim", "mamba_d_conv", 4),
    Field("scan_conv_bias", "mamba_conv_bias", True),
)
KIND = "selective_scan"


def step_rank(key: str) -> Lens:
    """Return the lens of the rank of time steps, which ``key`` holds."""

    def read(hf: HfConfig) -> JsonObject:
        rank = hf.get(key, "auto")
        if rank != "auto" and not isinstance(rank, int):
            raise HfConfigError(f"config.json: {key!r} is {rank!r}; expected a number, or 'auto'")
        return {"scan_step_rank": math.ceil(hf["hidden_size"] / 16) if rank == "auto" else rank}

    return Lens(read, lambda values: {key: values["scan_step_rank"]})


def expanded(hf: HfConfig, key: str) -> int:
    """Return the number of channels inside a layer, the factor ``key`` times the hidden size."""
    factor = hf.get(key, 2)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise HfConfigError(f"config.json: {key!r} is {factor!r}; expected a number")
    return int(factor * hf["hidden_size"])


CHANNELS = Lens(
    lambda hf: {"scan_channels": expanded(hf, "mamba_expand")},
    lambda values: {"mamba_expand": values["scan_channels"] // values["hidden_size"]},
)


def scanned(config: McaModelConfig) -> list[Param]:
    """Return the rules of a Mamba 1 layer with the norm before it."""
    channels = given(config.selective_scan).scan_channels
    cut = {
        "in_proj.weight": fused((channels, channels)),
        **dict.fromkeys(("conv1d.weight", "conv1d.bias", "A_log", "D"), COLUMN),
        "x_proj.weight": ROW,
        **dict.fromkeys(("dt_proj.weight", "dt_proj.bias"), COLUMN),
        "out_proj.weight": ROW,
    }
    if not given(config.selective_scan).scan_conv_bias:
        del cut["conv1d.bias"]
    parts = ("dt", "b", "c") if given(config.selective_scan).scan_norm == "weighted" else ()
    norms = (f"{part}_layernorm.weight" for part in parts)
    return [
        inner("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        *(inner(f"self_attention.{name}", f"mamba.{name}", shard=shard) for name, shard in cut.items()),
        *(inner(f"self_attention.{name}", f"mamba.{name}") for name in norms),
    ]


def scanned_or_attended(config: McaModelConfig) -> Iterator[Param]:
    """Mamba 1 or attention of every decoder layer, with the norm before it."""
    kinds = {True: scanned(config), False: attention(config)}
    for layer in range(config.num_layers):
        yield from expand_rules(kinds[config.is_scan_layer(layer)], layers=[layer])


def _saved_tensors(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of a Mamba 1 layer: states of chunks only, which the backward pass computes again."""
    own, tokens, width = given(config.selective_scan), sizes.tokens, sizes.width
    channels = own.scan_channels / sizes.layout.tp
    shared = own.scan_step_rank + 2 * own.scan_state_dim
    norms = 0 if own.scan_norm == "none" else 2 * (SINGLE + width)
    net = "mca_models/megatron/features/selective_scan.py: _sequence"
    scan = "mca_models/megatron/features/selective_scan.py: selective_scan"
    return [
        SavedTensor("convolution: padded, its output, and activated", 3 * tokens * channels * width, net),
        SavedTensor("norms of steps, B and C", tokens * shared * norms, net),
        SavedTensor("gate, in fp32 and activated", tokens * channels * 2 * SINGLE, net),
        SavedTensor("output, and gated", tokens * channels * (SINGLE + width), net),
        SavedTensor("steps, before and after softplus", tokens * channels * 2 * SINGLE, scan),
        SavedTensor("inputs, B and C in fp32", tokens * (channels + 2 * own.scan_state_dim) * SINGLE, scan),
        SavedTensor("states", tokens / CHUNK * channels * own.scan_state_dim * SINGLE, scan),
    ]


def _weights(config: McaModelConfig, sizes: LayerSizes) -> float:
    own = given(config.selective_scan)
    rows = 3 * config.hidden_size + 2 * own.scan_step_rank + 2 * own.scan_state_dim
    return own.scan_channels * rows / sizes.layout.tp


def _flops(config: McaModelConfig, sizes: LayerSizes) -> float:
    own = given(config.selective_scan)
    doublings = math.log2(CHUNK)
    return sizes.tokens * own.scan_channels * own.scan_state_dim * (6 + 3 * doublings) / sizes.layout.tp


SCAN_COSTS = MixerCosts(_saved_tensors, _weights, _flops)
