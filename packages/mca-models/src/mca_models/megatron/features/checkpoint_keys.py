"""One naming scheme for distributed checkpoints, Transformer Engine's, for both layer implementations.

The local layers have separate norms where Transformer Engine fuses them into the next linear. Megatron's map of their
names takes every MLP for a dense one and every attention for an ordinary one, and is missing for MLA. Without a map for
each layer, Transformer Engine's layers could not load a checkpoint of the local layers, nor the other way round.
"""

from collections.abc import Iterable, Mapping

from mca_models.megatron.names import NamingScheme
from mca_models.templates.parts.mtp import MTP
from mca_models.weights import Param, Stage

_INSIDE = {Stage.LAYER: "decoder.layers.{layer}.", Stage.MTP: f"{MTP}transformer_layer."}


def keys_map(params: Iterable[Param], stage: Stage, layer: int) -> Mapping[str, str]:
    """Return the checkpoint keys inside one decoder or MTP layer by the local layers' keys, where they differ.

    Args:
        params: Parameters of the whole model.
        stage: `Stage.LAYER`, or `Stage.MTP` for the decoder layer inside an MTP layer.
        layer: Number of the layer in the model.
    """
    local, before = NamingScheme("local", grouped_experts=True), _INSIDE[stage]
    names = [
        param.mca
        for param in params
        if param.stage is stage and param.layer == layer and param.mca.startswith(before)
    ]
    return {
        local.live(mca).removeprefix(before): mca.removeprefix(before)
        for mca in names
        if local.live(mca) != mca
    }
