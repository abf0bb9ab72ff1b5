"""All features, in the order in which they apply, and loops over them: settings, layer specs, built chunks."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.attention import (
    ALIBI,
    ATTENTION,
    ATTENTION_BIASES,
    CHUNKED_ATTENTION,
    CLIPPED_QKV,
    QUERY_TEMPERATURE,
    SOFTCAP,
)
from mca_models.megatron.features.block import (
    LAYER_SCALARS,
    NORMED_RESIDUAL,
    PARALLEL_BLOCK,
    RESIDUAL_MULTIPLIER,
    SINGLE_BLOCKS,
)
from mca_models.megatron.features.block_sparse_attention import BLOCK_SPARSE_ATTENTION
from mca_models.megatron.features.dsa import DSA
from mca_models.megatron.features.embedding import (
    EMBEDDING,
    EMBEDDING_LAYERNORM,
    EMBEDDING_MULTIPLIER,
    EMBEDDING_NORM,
    LEARNED_POSITIONS,
)
from mca_models.megatron.features.feature import (
    ClassChange,
    Context,
    Feature,
    LayerContext,
    RouterChange,
    SpecChange,
    SpecChanges,
)
from mca_models.megatron.features.gated_delta_net import GATED_DELTA_NET
from mca_models.megatron.features.head import (
    CLASSIFICATION_HEAD,
    LOGITS_SCALE,
    OUTPUT_BIAS,
    PADDED_VOCABULARY,
)
from mca_models.megatron.features.heterogeneous_heads import (
    HETEROGENEOUS_HEADS,
    HETEROGENEOUS_LAYERS,
    HETEROGENEOUS_MLPS,
    NARROW_VALUES,
)
from mca_models.megatron.features.identity_experts import IDENTITY_EXPERTS
from mca_models.megatron.features.kimi_delta_attention import KIMI_DELTA_ATTENTION
from mca_models.megatron.features.lightning_attention import LIGHTNING_ATTENTION
from mca_models.megatron.features.mamba import MAMBA
from mca_models.megatron.features.media import IMAGES
from mca_models.megatron.features.mla import MLA
from mca_models.megatron.features.mlp import MLP, XIELU
from mca_models.megatron.features.moe import BIASED_EXPERTS, LATENT_MOE, MOE, MOE_POST_NORM
from mca_models.megatron.features.moe_with_dense_mlp import MOE_WITH_DENSE_MLP
from mca_models.megatron.features.mrope import MROPE
from mca_models.megatron.features.mtp import MTP, MTP_BEFORE_NORM, MTP_LOSS
from mca_models.megatron.features.norms import (
    CUSTOM_NORMS,
    FULL_WIDTH_QK_NORMS,
    NORMS,
    NORMS_AFTER_ROPE,
    PER_HEAD_QK_NORMS,
    POST_NORMS,
)
from mca_models.megatron.features.per_layer_embedding import PER_LAYER_EMBEDDING
from mca_models.megatron.features.rope import DUAL_ROPE, ROPE
from mca_models.megatron.features.router_replay import ROUTER_REPLAY
from mca_models.megatron.features.routers import (
    BIASED_ROUTER,
    GROUP_ROUTER,
    SHARED_EXPERT_MEAN,
    SIGMOID_ROUTER,
)
from mca_models.megatron.features.selective_scan import SELECTIVE_SCAN
from mca_models.megatron.features.shared_kv import SHARED_KV
from mca_models.megatron.features.short_convolution import SHORT_CONVOLUTION
from mca_models.megatron.features.shortcut_moe import SHORTCUT_MOE
from mca_models.megatron.features.sparse_mixer import NOISY_EXPERTS, SPARSE_MIXER
from mca_models.megatron.features.vision_tower import VISION_TOWER
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.spec import changed, engine_attention
from mca_models.megatron.names import Implementation, NamingScheme
from mca_models.megatron.types import GptModel, MegatronConfig, Settings, Spec
from mca_models.templates import get_family
from mca_models.templates.parts.mtp import MTP as MTP_PREFIX
from mca_models.weights import Param, Stage

FEATURES: tuple[Feature, ...] = (
    ATTENTION,
    NORMS,
    MLP,
    MTP,
    HETEROGENEOUS_LAYERS,
    ROPE,
    DUAL_ROPE,
    MROPE,
    LEARNED_POSITIONS,
    CUSTOM_NORMS,
    POST_NORMS,
    FULL_WIDTH_QK_NORMS,
    PER_HEAD_QK_NORMS,
    NORMS_AFTER_ROPE,
    PARALLEL_BLOCK,
    RESIDUAL_MULTIPLIER,
    NORMED_RESIDUAL,
    MOE,
    BIASED_EXPERTS,
    LATENT_MOE,
    SIGMOID_ROUTER,
    SPARSE_MIXER,
    GROUP_ROUTER,
    BIASED_ROUTER,
    ROUTER_REPLAY,
    NOISY_EXPERTS,
    SHARED_EXPERT_MEAN,
    MOE_WITH_DENSE_MLP,
    MOE_POST_NORM,
    IDENTITY_EXPERTS,
    SHORTCUT_MOE,
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    SHORT_CONVOLUTION,
    LIGHTNING_ATTENTION,
    SOFTCAP,
    QUERY_TEMPERATURE,
    CHUNKED_ATTENTION,
    ALIBI,
    NARROW_VALUES,
    HETEROGENEOUS_HEADS,
    BLOCK_SPARSE_ATTENTION,
    MLA,
    DSA,
    CLIPPED_QKV,
    ATTENTION_BIASES,
    MAMBA,
    SELECTIVE_SCAN,
    SINGLE_BLOCKS,
    XIELU,
    OUTPUT_BIAS,
    EMBEDDING_NORM,
    EMBEDDING_LAYERNORM,
    EMBEDDING_MULTIPLIER,
    LOGITS_SCALE,
    MTP_BEFORE_NORM,
    VISION_TOWER,
    IMAGES,
    PER_LAYER_EMBEDDING,
    HETEROGENEOUS_MLPS,
    SHARED_KV,
    LAYER_SCALARS,
    EMBEDDING,
    PADDED_VOCABULARY,
    CLASSIFICATION_HEAD,
    MTP_LOSS,
)


def active_features(config: McaModelConfig) -> tuple[Feature, ...]:
    """Return the features of a model, in the order in which they apply."""
    return tuple(feature for feature in FEATURES if feature.enabled(config))


def settings(config: McaModelConfig) -> Settings:
    """Return the settings of the architecture."""
    chosen: Settings = {}
    for feature in active_features(config):
        chosen |= feature.settings(config)
    return chosen


def positions(config: McaModelConfig) -> str:
    """Return Megatron's ``position_embedding_type``."""
    chosen = "rope"
    for feature in active_features(config):
        chosen = feature.position_embedding or chosen
    return chosen


@contextmanager
def building(
    config: McaModelConfig, megatron: MegatronConfig, implementation: Implementation
) -> Iterator[None]:
    """Prepare all features for Megatron's construction of a chunk, in this block."""
    with ExitStack() as stack:
        for feature in active_features(config):
            stack.enter_context(feature.prepare(Context(config, implementation), megatron))
        yield


def finish(model: GptModel, config: McaModelConfig) -> None:
    """Apply the features of a model to a built chunk; runs before anything else hooks its logits."""
    for feature in active_features(config):
        feature.finish(model, config)


_INSIDE = {Stage.LAYER: "decoder.layers.{layer}.", Stage.MTP: f"{MTP_PREFIX}transformer_layer."}


def adapted_block(
    spec: Spec, config: McaModelConfig, implementation: Implementation, layers: Sequence[int]
) -> Spec:
    """Return the spec of a chunk with decoder ``layers``."""
    block = _adapted_to_model(spec, Context(config, implementation))
    params = get_family(config.model_type).params(config)
    layer_specs = []
    for number, layer_spec in zip(layers, block.layer_specs, strict=True):
        context = LayerContext(config, implementation, layer=config.layer_config(number), number=number)
        names = _checkpoint_names(params, Stage.LAYER, number, implementation)
        layer_specs.append(_adapted_to_layer(layer_spec, context, names))
    return dataclasses.replace(block, layer_specs=layer_specs)


def adapted_prediction(spec: Spec, config: McaModelConfig, implementation: Implementation) -> Spec:
    """Return the spec of a chunk's MTP layers, which are all alike; None stays None."""
    block = _adapted_to_model(spec, Context(config, implementation))
    params = get_family(config.model_type).params(config)
    context = LayerContext(config, implementation, layer=config, number=None)
    return _adapted_to_layer(block, context, _checkpoint_names(params, Stage.MTP, 0, implementation))


def _adapted_to_model(spec: Spec, context: Context) -> Spec:
    """Apply the changes that all layers share to ``spec`` of a block or of MTP layers."""
    features = active_features(context.config)
    changes = [_core_attention(context), *(feature.spec(context) for feature in features)]
    routers = [feature.router for feature in features if feature.router is not None]
    changes += [SpecChanges({"router": _with_config(adapt, context.config)}) for adapt in routers]
    return changed(spec, *_composed(changes))


def _with_config(adapt: RouterChange, config: McaModelConfig) -> ClassChange:
    return lambda router: adapt(router, config)


def _core_attention(context: Context) -> SpecChanges:
    changes = [feature.core_attention for feature in active_features(context.config)]
    core: type[CoreAttention] = CoreAttention
    for change in filter(None, changes):
        core = change(core, context.config)
    if not any(changes):
        return SpecChanges()
    engine = [engine_attention()] if context.implementation == "transformer_engine" else []
    return SpecChanges(classes={kind: lambda _: core for kind in (CoreAttention, *engine)})


def _adapted_to_layer(spec: Spec, context: LayerContext, names: Mapping[str, SpecChange]) -> Spec:
    changes = [feature.layer(context) for feature in active_features(context.config)]
    return changed(spec, *_composed([SpecChanges(names), *changes]))


def _checkpoint_names(
    params: Sequence[Param], stage: Stage, layer: int, implementation: Implementation
) -> dict[str, SpecChange]:
    """Return the change that gives a layer's checkpoint keys Transformer Engine's names.

    The local layers have separate norms where Transformer Engine fuses them into the next linear. Megatron's map of
    their names takes every MLP for a dense one and every attention for an ordinary one, and is missing for MLA. Without
    a map for each layer, Transformer Engine's layers could not load a checkpoint of the local layers, nor the other way
    round.

    Args:
        params: Parameters of the whole model.
        stage: `Stage.LAYER`, or `Stage.MTP` for the decoder layer inside an MTP layer.
        layer: Number of the layer in the model.
        implementation: Layer implementation.
    """
    if implementation == "transformer_engine":
        return {}
    local, before = NamingScheme("local", grouped_experts=True), _INSIDE[stage]
    names = [
        param.mca
        for param in params
        if param.stage is stage and param.layer == layer and param.mca.startswith(before)
    ]
    keys = {
        local.live(mca).removeprefix(before): mca.removeprefix(before)
        for mca in names
        if local.live(mca) != mca
    }
    return {"sharded_state_dict_keys_map": lambda megatron_map: keys}


def _composed(changes: Iterable[SpecChanges]) -> tuple[dict[str, SpecChange], dict[type, type]]:
    """Return the change of each field, and the replacement of each class; later changes take the result of earlier."""
    fields: dict[str, SpecChange] = {}
    classes: dict[type, type] = {}
    for change in changes:
        for name, function in change.fields.items():
            fields[name] = _after(fields[name], function) if name in fields else function
        for kind, replace in change.classes.items():
            classes[kind] = replace(classes.get(kind, kind))
    return fields, classes


def _after(first: SpecChange, second: SpecChange) -> SpecChange:
    return lambda value: second(first(value))
