"""Which parameters a pipeline chunk holds, and what the live modules call them.

Checkpoints have one spelling, Transformer Engine's with global layer and expert numbers. Live modules number
layers from 0 in each chunk and experts from 0 on each rank, and the local spec names some modules otherwise. Live
names are generated from the rules of the family; none is parsed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mca_config.layout import Coordinates, ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.templates import family_of
from mca_models.weights import Param, Stage

DtypeName = Literal["float32", "bfloat16", "float16"]
Implementation = Literal["transformer_engine", "local"]

_LOCAL_SPELLING: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Where the local spec has a norm of its own for one that Transformer Engine fuses into the linear after it."""

_SEQUENTIAL_EXPERTS: Mapping[str, str] = {
    "mlp.experts.linear_fc1.weight{expert}": "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    "mlp.experts.linear_fc2.weight{expert}": "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    "mlp.experts.linear_fc1.bias{expert}": "mlp.experts.local_experts.{expert}.linear_fc1.bias",
    "mlp.experts.linear_fc2.bias{expert}": "mlp.experts.local_experts.{expert}.linear_fc2.bias",
}
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Spelling:
    """How the live modules of this process name things.

    Args:
        implementation: Which layer spec they were built from.
        grouped_experts: One module holds all experts of a rank (else one module for each).
        mtp_layer: Megatron's name for the decoder layer inside a prediction layer.
    """

    implementation: Implementation
    grouped_experts: bool = False
    mtp_layer: str = "transformer_layer"

    def live(self, mca: str) -> str:
        """The live form of the canonical name template ``mca``, its ``{layer}`` and ``{expert}`` kept."""
        table = dict(_LOCAL_SPELLING) if self.implementation == "local" else {}
        table |= {} if self.grouped_experts else _SEQUENTIAL_EXPERTS
        table |= {"}.transformer_layer.": "}." + self.mtp_layer + "."}
        for canonical, live in table.items():
            mca = mca.replace(canonical, live)
        return mca


@dataclass(frozen=True)
class Held:
    """A parameter that a chunk holds.

    Args:
        live: Its name in the live chunk.
        param: Its rule, with global layer and expert.
        copy: A second copy of a parameter that another chunk, or another name, stands for: loaded, never saved.
    """

    live: str
    param: Param
    copy: bool = False


def chunk_params(
    config: McaModelConfig, chunk: PipelineChunk, layout: ParallelLayout, at: Coordinates, spelling: Spelling
) -> list[Held]:
    """Every parameter that the rank at ``at`` holds of ``chunk``, in checkpoint order."""
    return list(_held(config, chunk, layout, at, spelling))


def _held(
    config: McaModelConfig, chunk: PipelineChunk, layout: ParallelLayout, at: Coordinates, spelling: Spelling
) -> Iterator[Held]:
    first_layer = chunk.layers[0] if chunk.layers else 0
    experts = _experts(config, layout, at)
    for param in family_of(config.model_type).params(config):
        if not _on_chunk(param, config, chunk) or (param.expert is not None and param.expert not in experts):
            continue
        if param.alias_of is not None and chunk.has_embedding:
            continue  # the output layer uses the embedding's own tensor
        layer = (
            None if param.layer is None else param.layer - (first_layer if param.stage == Stage.LAYER else 0)
        )
        expert = None if param.expert is None else param.expert - experts.start
        live = replace(param, mca=spelling.live(param.mca), layer=layer, expert=expert).mca_name()
        is_copy = param.alias_of is not None or (param.mca == _EMBEDDING and not chunk.has_embedding)
        yield Held(live, param, is_copy)


def _on_chunk(param: Param, config: McaModelConfig, chunk: PipelineChunk) -> bool:
    if param.stage == Stage.LAYER:
        return param.layer in chunk.layers
    if param.stage == Stage.MTP:
        return param.layer in chunk.mtp_layers
    if param.stage == Stage.FIRST:
        return chunk.has_embedding or bool(chunk.mtp_layers)
    if param.stage == Stage.NORM:
        return config.num_layers - 1 in chunk.layers if config.mtp_num_layers else chunk.has_loss
    return chunk.has_loss


def _experts(config: McaModelConfig, layout: ParallelLayout, at: Coordinates) -> range:
    """The experts of expert rank ``at.ep``."""
    share = (config.num_moe_experts or 0) // layout.ep
    return range(at.ep * share, (at.ep + 1) * share)
