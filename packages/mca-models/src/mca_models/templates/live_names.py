"""Names and positions of template parameters in live Megatron models.

Checkpoints have one naming scheme, Transformer Engine's with global layer and expert numbers. A live chunk numbers its
layers from 0 and its experts from 0 on each rank, and spells some names after the layer spec that it was built from.
Callers decide which scheme a model or a file has.
"""

from collections.abc import Mapping
from dataclasses import replace

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.weights import Param, Stage

LOCAL_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Separate norms of the local spec, by the names that Transformer Engine fuses into the linear after them."""

SEQUENTIAL_EXPERTS: Mapping[str, str] = {
    f"mlp.experts.{linear}.{kind}{{expert}}": f"mlp.experts.local_experts.{{expert}}.{linear}.{kind}"
    for kind in ("weight", "bias")
    for linear in ("linear_fc1", "linear_fc2")
}
"""One module for each expert instead of one for all (grouped GEMM)."""

MTP_LAYER = "transformer_layer"
"""Decoder layer inside an MTP layer, in checkpoints and in megatron-core up to 0.16."""


def renamed_mtp_layer(live: str) -> dict[str, str]:
    """Return the rename of the decoder layer inside an MTP layer, which megatron-core calls ``live``."""
    return {f"}}.{MTP_LAYER}.": f"}}.{live}."}


def is_in_chunk(param: Param, config: McaModelConfig, chunk: PipelineChunk) -> bool:
    """Return whether ``chunk`` holds ``param``; copies for MTP layers and tied heads are not counted."""
    if param.stage is Stage.LAYER:
        return param.layer in chunk.layers
    if param.stage is Stage.MTP:
        return param.layer in chunk.mtp_layers
    if param.stage in (Stage.FIRST, Stage.VISION):
        return chunk.has_embedding
    if param.stage is Stage.NORM and config.mtp_num_layers:
        return config.num_layers - 1 in chunk.layers  # before the MTP layers
    return chunk.has_loss


def local_experts(config: McaModelConfig, layout: ParallelLayout, ep: int) -> range:
    """The experts of expert rank ``ep``."""
    share = (config.num_experts) // layout.ep
    return range(ep * share, (ep + 1) * share)


def live_name(param: Param, template: str, chunk: PipelineChunk, experts: range) -> str:
    """Name ``template`` of ``param``, with the layer as ``chunk`` and the expert as a rank of ``experts`` counts it."""
    layer = param.layer
    if layer is not None and param.stage is Stage.LAYER and chunk.layers:
        layer -= chunk.layers[0]
    expert = None if param.expert is None else param.expert - experts.start
    return replace(param, mca=template, layer=layer, expert=expert).mca_name()
