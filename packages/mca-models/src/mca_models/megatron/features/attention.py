"""Attention with options that Megatron lacks: of its core attention, clipped projections, and separate biases."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache

from torch import Tensor

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.feature import Feature, Setup, change_self_attention
from mca_models.megatron.layers.attention import CoreAttention, attention_with_options
from mca_models.megatron.types import MegatronConfig, Settings


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
_SAME_NAME = (
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
)


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


def _window(config: McaModelConfig) -> Settings:
    """Return the sliding window: mca counts the query itself, Megatron the keys to its left."""
    if config.attention.window_size is None:
        return {}
    kinds = config.layer_types or ("sliding_attention",) * config.num_layers
    return {
        "window_size": (config.attention.window_size - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _settings(config: McaModelConfig) -> Settings:
    attention = config.attention
    values: Settings = {name: getattr(attention, name) for name in _SAME_NAME} | _window(config)
    if attention.softmax_scale is not None:
        values["softmax_scale"] = attention.softmax_scale
    if attention.attention_output_gate:
        values["attention_output_gate"] = True
    if attention.softmax_type != "vanilla":
        values["softmax_type"] = attention.softmax_type
    return values


def _problems(setup: Setup) -> Iterator[str]:
    """Yield attention variants for which the kernel in use has no context parallelism."""
    config, layout, settings = setup.config, setup.layout, setup.settings
    kind = settings.get("cp_comm_type")
    if setup.mca_attention:
        if kind not in (None, "all_gather"):
            yield _gathered(setup, str(kind))
        return
    if layout.cp == 1:
        return
    if not settings.get("bf16") and not settings.get("fp16"):
        yield (
            "Transformer Engine's attention has no context parallelism in fp32; train in bf16 or fp16, or set "
            "attention_backend to local"
        )
    ring = kind in (None, "p2p")
    if config.attention.window_size is not None and ring:
        yield (
            "Transformer Engine's ring attention has no sliding window; set cp_comm_type to all_gather or a2a, "
            "or attention_backend to local"
        )
    if config.attention.softmax_type != "vanilla":
        yield (
            "Transformer Engine has attention sinks under context parallelism only with cp_comm_type a2a, where each "
            "context rank counts their whole gradient and so it is added several times; set attention_backend to local"
        )
    if kind == "a2a":
        yield from _shared_heads(config, layout)


def _gathered(setup: Setup, kind: str) -> str:
    if setup.custom_attention:
        return (
            f"cp_comm_type {kind} is not supported for {setup.config.model_type}, whose attention is always mca's and "
            "gathers keys and values; set it to all_gather or remove it"
        )
    return (
        f"cp_comm_type {kind} needs Transformer Engine's attention (transformer_impl transformer_engine, "
        "attention_backend other than local); mca's attention gathers keys and values (all_gather)"
    )


def _shared_heads(config: McaModelConfig, layout: ParallelLayout) -> Iterator[str]:
    """Yield the limit of a2a: each context rank needs full heads, and the fused kernel an even number of them."""
    multiple = math.lcm(2, layout.cp)
    for kind in config.kinds():
        heads, groups = (
            max(n // layout.tp, 1)
            for n in (kind.attention.num_attention_heads, kind.attention.num_query_groups)
        )
        if heads % multiple or groups % multiple:
            yield (
                f"cp_comm_type a2a cuts the {heads} heads of a tensor rank and its {groups} of keys and values over "
                f"context_parallel_size {layout.cp}, which needs multiples of {multiple}; set it to p2p or all_gather, "
                "or change the sizes"
            )
            return


ATTENTION = Feature(name="attention", enabled=lambda config: True, settings=_settings, problems=_problems)
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
