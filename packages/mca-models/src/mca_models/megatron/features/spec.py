"""Megatron's layer specs with the modules of the model's features.

Settings are changed in `settings`, built chunks in `chunk`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.attention import with_biases, with_clipped_qkv
from mca_models.megatron.features.block_sparse_attention import with_block_indexer
from mca_models.megatron.features.checkpoint_keys import keys_map
from mca_models.megatron.features.core_attention import custom_core_attention
from mca_models.megatron.features.dsa import with_indexer
from mca_models.megatron.features.dual_rope import rope_widths, with_layer_rope
from mca_models.megatron.features.gated_delta_net import delta_net_spec
from mca_models.megatron.features.heterogeneous_heads import heads_by_layer, sized, with_heterogeneous_heads
from mca_models.megatron.features.identity_experts import with_identity_experts
from mca_models.megatron.features.image_limits import image_reach
from mca_models.megatron.features.kimi_delta_attention import kimi_delta_spec
from mca_models.megatron.features.mamba import mamba_spec, with_parallel_mamba
from mca_models.megatron.features.mla import with_mla_multipliers, with_plain_query
from mca_models.megatron.features.moe_with_dense_mlp import with_dense_mlp
from mca_models.megatron.features.norms import (
    FullWidthKeyNorm,
    FullWidthNorm,
    PerHeadKeyNorm,
    PerHeadNorm,
    PostRopeNorm,
    PostRopeNormWithoutWeight,
)
from mca_models.megatron.features.parallel_block import SharedNorm, second_norm
from mca_models.megatron.features.router import custom_router
from mca_models.megatron.features.scales import scaled_residual
from mca_models.megatron.features.short_convolution import short_convolution_spec
from mca_models.megatron.features.shortcut_moe import with_separate_experts, with_shortcut
from mca_models.megatron.features.sigmoid_router import with_shared_expert_mean
from mca_models.megatron.features.sparse_mixer import with_noisy_input
from mca_models.megatron.layers.attention import CoreAttention, image_attention
from mca_models.megatron.layers.norm import Norm, norm_with
from mca_models.megatron.layers.rope import attention_factor
from mca_models.megatron.layers.spec import engine_attention, rebuilt
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import Spec
from mca_models.templates import get_family
from mca_models.weights import Param, Stage

Change = Callable[[Spec], Spec]


def adapted_block(
    spec: Spec, config: McaModelConfig, implementation: Implementation, layers: Sequence[int]
) -> Spec:
    """Return the spec of a chunk with decoder ``layers``."""
    block = _common_changes(spec, config, implementation)
    params = get_family(config.model_type).params(config)
    layer_specs = []
    for layer, layer_spec in zip(layers, block.layer_specs, strict=True):
        changes = _checkpoint_names(params, Stage.LAYER, layer, implementation)
        if config.is_linear_layer(layer):
            changes["self_attention"] = lambda attention: _linear_attention(config, implementation)
        if config.is_mamba_layer(layer):
            changes["self_attention"] = lambda attention: mamba_spec(implementation, config)
        if config.is_conv_layer(layer):
            changes["self_attention"] = lambda attention: short_convolution_spec(implementation, config)
        changes |= _absent_blocks(config, layer) | _shared_kv_changes(config.layer_config(layer), config)
        without_norms = _without_pre_norms(layer_spec, config.layer_config(layer), implementation)
        layer_specs.append(_changed(without_norms, changes, {}))
    return dataclasses.replace(block, layer_specs=layer_specs)


def _linear_attention(config: McaModelConfig, implementation: Implementation) -> Spec:
    return (
        kimi_delta_spec(implementation)
        if given(config.linear_attention).linear_channel_decay
        else delta_net_spec(config, implementation)
    )


def adapted_prediction(spec: Spec, config: McaModelConfig, implementation: Implementation) -> Spec:
    """Return the spec of a chunk's MTP layers, which are all alike; None stays None."""
    params = get_family(config.model_type).params(config)
    common = _common_changes(spec, config, implementation)
    without_norms = _without_pre_norms(common, config, implementation)
    return _changed(without_norms, _checkpoint_names(params, Stage.MTP, 0, implementation), {})


def _checkpoint_names(
    params: Sequence[Param], stage: Stage, layer: int, implementation: Implementation
) -> dict[str, Change]:
    """Return the change that gives a layer's checkpoint keys Transformer Engine's names."""
    if implementation == "transformer_engine":
        return {}
    keys = keys_map(params, stage, layer)
    return {"sharded_state_dict_keys_map": lambda megatron_map: keys}


def _common_changes(spec: Spec, config: McaModelConfig, implementation: Implementation) -> Spec:
    """Apply the changes that all layers share to ``spec`` of a block or of MTP layers."""
    changes: dict[str, Change] = {}
    if config.norm.norm_placement != "post" and config.has_custom_norms:
        changes |= _norm_changes(config)
    if config.attention.qk_layernorm_full_width:
        changes |= {"q_layernorm": lambda norm: FullWidthNorm, "k_layernorm": lambda norm: FullWidthKeyNorm}
    if config.attention.qk_layernorm_per_head:
        changes |= {"q_layernorm": lambda norm: PerHeadNorm, "k_layernorm": lambda norm: PerHeadKeyNorm}
    if config.attention.qk_layernorm_after_rope:
        post_rope = PostRopeNorm if config.attention.qk_layernorm_weight else PostRopeNormWithoutWeight
        changes |= dict.fromkeys(("q_layernorm", "k_layernorm"), lambda norm: post_rope)
    if config.block.residual_multiplier != 1.0:
        factor = config.block.residual_multiplier
        changes |= dict.fromkeys(("self_attn_bda", "mlp_bda"), lambda add: scaled_residual(add, factor))
    if (router := custom_router(config)) is not None:
        changes["router"] = router
    if config.moe is not None and config.moe.experts_beside_mlp:
        changes["pre_mlp_layernorm"] = _nothing
    return _changed(spec, changes, _classes(config, implementation))


def _without_pre_norms(spec: Spec, config: McaModelConfig, implementation: Implementation) -> Spec:
    """Remove the norms before attention and MLP from ``spec`` of a layer with post-norms."""
    if config.norm.norm_placement != "post":
        return spec
    none = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), _nothing)
    return _changed(spec, none, _plain_linears() if implementation == "transformer_engine" else {})


def _classes(config: McaModelConfig, implementation: Implementation) -> dict[type, type]:
    """Return the replacements of module classes anywhere in a spec."""
    classes = _without_norms_inside(config, implementation)
    if (core := custom_core_attention(config)) is not None:
        classes[CoreAttention] = core
        if implementation == "transformer_engine":
            classes[engine_attention()] = core
    elif reach := image_reach(config):
        classes[CoreAttention] = image_attention(reach)
    if config.mla is not None:
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention

        mla = MLASelfAttention if config.mla.q_lora_rank else with_plain_query(MLASelfAttention)
        factors = config.mla.query_multiplier, config.mla.latent_multiplier
        mla = mla if factors == (1.0, 1.0) else with_mla_multipliers(mla, *factors)
        classes[MLASelfAttention] = mla if config.dsa is None else with_indexer(mla)
    classes |= _experts(config)
    from megatron.core.transformer.attention import SelfAttention

    attention = _self_attention(SelfAttention, config)
    parallel = config.has_parallel_mamba
    classes[SelfAttention] = with_parallel_mamba(attention, config, implementation) if parallel else attention
    return classes


def _experts(config: McaModelConfig) -> dict[type, type]:
    """Return the replacements of Megatron's MoE layer and of the layer around it."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    experts: type = MoELayer
    if config.moe is None:
        return {}
    if config.moe.input_jitter_noise:
        experts = with_noisy_input(experts, config.moe.input_jitter_noise)
    if config.moe.moe_shared_expert_mean:
        experts = with_shared_expert_mean(experts)
    if config.moe.experts_beside_mlp:
        experts = with_dense_mlp(experts)
    if config.moe.moe_identity_experts:
        experts = with_identity_experts(experts, config.moe.moe_identity_experts)
    if not config.moe.moe_shortcut:
        return {MoELayer: experts}
    return {MoELayer: with_separate_experts(experts), TransformerLayer: with_shortcut(TransformerLayer)}


def _self_attention(attention: type, config: McaModelConfig) -> type:
    """Return Megatron's attention class with this model's features."""
    if config.rope.rotary_base_local is not None:
        attention = with_layer_rope(
            attention, config.layer_types or (), attention_factor(config), rope_widths(config)
        )
    if config.has_custom_qkv:
        attention = with_heterogeneous_heads(attention, heads_by_layer(config))
    if config.block_sparse_attention is not None:
        attention = with_block_indexer(attention)
    if config.attention.clip_qkv is not None:
        attention = with_clipped_qkv(attention, config.attention.clip_qkv)
    if config.attention.add_bias_attention is not None:
        attention = with_biases(attention, biased=config.attention.add_bias_attention)
    return attention


def _norm_changes(config: McaModelConfig) -> dict[str, Change]:
    before = norm_with(weight=config.norm.norm_weight, bias=config.norm.norm_bias)
    between = {"none": before, "one_norm": SharedNorm, "two_norms": second_norm(before)}[
        config.block.parallel_block
    ]
    return {"input_layernorm": lambda norm: before, "pre_mlp_layernorm": lambda norm: between}


def _without_norms_inside(config: McaModelConfig, implementation: Implementation) -> dict[type, type]:
    """Return replacements of Transformer Engine's fused norm-and-linear classes, and of the last norm."""
    if not config.has_custom_norms:
        return {}
    norm = norm_with(weight=config.norm.norm_weight, bias=config.norm.norm_bias)
    if implementation != "transformer_engine":
        return {Norm: norm}
    from megatron.core.extensions.transformer_engine import TENorm

    return {**_plain_linears(), TENorm: norm, Norm: norm}


def _plain_linears() -> dict[type, type]:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
    )

    return {TELayerNormColumnParallelLinear: TEColumnParallelLinear}


def _absent_blocks(config: McaModelConfig, layer: int) -> dict[str, Change]:
    """Return the changes that remove attention or MLP, with its norm, from layers without it."""
    from megatron.core.transformer.identity_op import IdentityFuncOp

    absent: dict[str, Change] = {}
    if not config.has_attention(layer):
        absent |= dict.fromkeys(("input_layernorm", "self_attention"), _nothing)
        absent["self_attn_bda"] = lambda add: IdentityFuncOp
    if not config.has_mlp(layer):
        absent |= dict.fromkeys(("pre_mlp_layernorm", "mlp"), _nothing)
        absent["mlp_bda"] = lambda add: IdentityFuncOp
    return absent


def _shared_kv_changes(layer: McaModelConfig, config: McaModelConfig) -> dict[str, Change]:
    """Return the changes of layers that reuse keys and values: no key norm, maybe another MLP size."""
    changes: dict[str, Change] = {"k_layernorm": _nothing} if layer.takes_keys else {}
    if layer.mlp.ffn_hidden_size != config.mlp.ffn_hidden_size:
        width = layer.mlp.ffn_hidden_size
        rows = width * (1 + config.mlp.gated_linear_unit)
        changes["linear_fc1"] = lambda linear: sized(linear, rows=rows)
        changes["linear_fc2"] = lambda linear: sized(linear, columns=width)
    return changes


def _nothing(module: Spec) -> Spec:
    from megatron.core.transformer.identity_op import IdentityOp

    return IdentityOp


def _changed(spec: Spec, changes: Mapping[str, Change], classes: Mapping[type, type]) -> Spec:
    """Return ``spec`` with named fields and classes replaced everywhere in it."""

    def exchange(name: str, value: Spec) -> Spec:
        if name in changes:
            return changes[name](value)
        if isinstance(value, type):
            return classes.get(value, value)
        return _changed(value, changes, classes)

    return rebuilt(spec, exchange)
