"""Megatron's layer specs with the modules of the model's features."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import (
    ClassChange,
    Context,
    LayerContext,
    RouterChange,
    SpecChange,
    SpecChanges,
)
from mca_models.megatron.features.features import active_features
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.layers.spec import changed, engine_attention
from mca_models.megatron.names import Implementation, NamingScheme
from mca_models.megatron.types import Spec
from mca_models.templates import get_family
from mca_models.templates.parts.mtp import MTP
from mca_models.weights import Param, Stage

_INSIDE = {Stage.LAYER: "decoder.layers.{layer}.", Stage.MTP: f"{MTP}transformer_layer."}


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
