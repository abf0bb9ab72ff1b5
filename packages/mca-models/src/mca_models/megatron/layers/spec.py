"""Layer specs: Megatron's, with mca's modules in place of local ones that lack features.

Changes for single features are in `features.features`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.layers.sharded import ReplicatedLinear
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import MegatronConfig, Spec


def block_spec(config: MegatronConfig, implementation: Implementation, vp_stage: int | None) -> Spec:
    """Return the spec of the decoder layers of one chunk.

    Args:
        config: Megatron's ``TransformerConfig``.
        implementation: Layer implementation.
        vp_stage: Virtual stage, None without virtual pipelining.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    engine = implementation == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    return _with_local_attention(spec, config) if engine else _with_local_modules(spec, config)


def mtp_spec(
    config: MegatronConfig, decoder: Spec, implementation: Implementation, vp_stage: int | None
) -> Spec:
    """Return the spec of the MTP layers of one chunk; None if it has none."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec

    engine = implementation == "transformer_engine"
    layers = get_gpt_decoder_layer_specs(config, engine, normalization=config.normalization)
    template = layers[_last_sparse_layer(config)]
    spec = get_gpt_mtp_block_spec(config, template, use_transformer_engine=engine, vp_stage=vp_stage)
    if spec is None:
        return None
    return _with_local_attention(spec, config) if engine else _with_local_modules(spec, config)


def _last_sparse_layer(config: MegatronConfig) -> int:
    """Return the decoder layer that MTP layers copy: the last one with experts, if there is one."""
    if not config.num_moe_experts:
        return -1
    sparse = [layer for layer, has_experts in enumerate(config.moe_layer_freq) if has_experts]
    return sparse[-1] if sparse else -1


def engine_attention() -> type:
    """Return Transformer Engine's core attention class, as in Megatron's specs."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention: type = TEDotProductAttention
    return attention


def _with_local_attention(spec: Spec, config: MegatronConfig) -> Spec:
    """Replace Transformer Engine's core attention by mca's if ``attention_backend`` is ``local``."""
    if config.attention_backend is None or config.attention_backend.name != "local":
        return spec
    return changed(spec, {}, {engine_attention(): CoreAttention})


def _with_local_modules(spec: Spec, config: MegatronConfig) -> Spec:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def replicate(linear: Spec) -> Spec:
        return ReplicatedLinear if linear is ColumnParallelLinear else linear

    names = ("linear_q_down_proj", "linear_kv_down_proj") if config.multi_latent_attention else ()
    classes = {WrappedTorchNorm: Norm, DotProductAttention: CoreAttention}
    return changed(spec, dict.fromkeys(names, replicate), classes)


def changed(spec: Spec, fields: Mapping[str, Callable[[Spec], Spec]], classes: Mapping[type, type]) -> Spec:
    """Return ``spec`` with named fields and classes replaced everywhere in it."""

    def exchange(name: str, value: Spec) -> Spec:
        if name in fields:
            return fields[name](value)
        if isinstance(value, type):
            return classes.get(value, value)
        return changed(value, fields, classes)

    return _rebuilt(spec, exchange)


def _rebuilt(spec: Spec, change: Callable[[str, Spec], Spec]) -> Spec:
    """Copy a spec tree (dataclasses, lists, dicts, partials) with ``change(name, child)`` for children."""
    if isinstance(spec, list | tuple):
        return type(spec)(change("", item) for item in spec)
    if isinstance(spec, dict):
        return {name: change(name, value) for name, value in spec.items()}
    if isinstance(spec, partial):
        keywords = {name: change(name, value) for name, value in spec.keywords.items()}
        return partial(change("", spec.func), *(change("", arg) for arg in spec.args), **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {f.name: change(f.name, getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.init}
        return type(spec)(**values)
    return spec
