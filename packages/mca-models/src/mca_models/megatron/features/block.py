"""Layers that are attention alone or an MLP alone, after one norm (Nemotron-H)."""

from mca_models.megatron.features.feature import Feature, LayerContext, SpecChange, SpecChanges, remove_module
from mca_models.megatron.types import Spec


def _no_addition(add: Spec) -> Spec:
    from megatron.core.transformer.identity_op import IdentityFuncOp

    return IdentityFuncOp


def _layer(context: LayerContext) -> SpecChanges:
    """Return the changes that remove attention or MLP, with its norm, from layers without it."""
    fields: dict[str, SpecChange] = {}
    if context.number is None:
        return SpecChanges()
    if not context.config.has_attention(context.number):
        fields |= dict.fromkeys(("input_layernorm", "self_attention"), remove_module)
        fields["self_attn_bda"] = _no_addition
    if not context.config.has_mlp(context.number):
        fields |= dict.fromkeys(("pre_mlp_layernorm", "mlp"), remove_module)
        fields["mlp_bda"] = _no_addition
    return SpecChanges(fields)


SINGLE_BLOCKS = Feature(
    name="layers of attention or an MLP alone",
    enabled=lambda config: config.block.single_blocks,
    layer=_layer,
)
