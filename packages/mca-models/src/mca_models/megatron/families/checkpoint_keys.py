"""Distributed checkpoints have one naming scheme, Transformer Engine's, whichever layers wrote them.

Megatron's local layers call a norm of their own what Transformer Engine fuses into the linear after it; its map of
their names to the checkpoint's takes every MLP for a dense one, every attention for an ordinary one, and is missing
for latent attention. Without a map made for each layer, what local layers wrote (weights, the optimizer's states)
could not be loaded by Transformer Engine's, nor by them what those wrote.
"""

from collections.abc import Iterable, Mapping

from mca_models.megatron.names import NamingScheme
from mca_models.templates.mtp import MTP
from mca_models.weights import Param, Stage

_INSIDE = {Stage.LAYER: "decoder.layers.{layer}.", Stage.MTP: f"{MTP}transformer_layer."}


def keys_map(params: Iterable[Param], stage: Stage, layer: int) -> Mapping[str, str]:
    """What local layers call otherwise than the checkpoint, inside one decoder or prediction layer.

    Args:
        params: Of the whole model.
        stage: `Stage.LAYER`, or `Stage.MTP` for the decoder layer inside a prediction layer.
        layer: Its number in the model.
    """
    local, before = NamingScheme("local", grouped_experts=True), _INSIDE[stage]
    mine = [
        param.mca
        for param in params
        if param.stage is stage and param.layer == layer and param.mca.startswith(before)
    ]
    return {
        local.live(mca).removeprefix(before): mca.removeprefix(before)
        for mca in mine
        if local.live(mca) != mca
    }
