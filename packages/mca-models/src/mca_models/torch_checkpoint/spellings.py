"""What Megatron's live modules call the parameters of one pipeline chunk on one expert rank.

A live chunk numbers its layers from 0 and its experts from 0, and spells some names after the layer
spec it was built from. Every spelling that a release in our range has is generated here from the
family's rules; a name in a file is then looked up, never taken apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.weights import Param, Stage

EMBEDDING = "embedding.word_embeddings.weight"
_FINAL_NORM = "decoder.final_layernorm."

_SPELLINGS: tuple[tuple[str, str], ...] = (
    # the local spec has a norm of its own where Transformer Engine fuses it into the linear after it
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    # one module for each expert instead of one for all (grouped GEMM)
    ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc1.weight"),
    ("mlp.experts.linear_fc2.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc2.weight"),
    ("mlp.experts.linear_fc1.bias{expert}", "mlp.experts.local_experts.{expert}.linear_fc1.bias"),
    ("mlp.experts.linear_fc2.bias{expert}", "mlp.experts.local_experts.{expert}.linear_fc2.bias"),
    # megatron-core 0.17 and later; the checkpoints kept the old name
    ("}.transformer_layer.", "}.mtp_model_layer."),
)

_GROUPED = (
    ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.weight1"),
    ("mlp.experts.linear_fc2.weight{expert}", "mlp.experts.weight2"),
)


class Spelling(NamedTuple):
    """One name that a live parameter may have."""

    name: str
    expert: int | None = None
    """Set if all experts of a rank stand in the one tensor: which of them, from 0."""


@dataclass(frozen=True)
class Held:
    """A parameter that a chunk holds.

    Args:
        param: Its rule, with global layer and expert.
        names: What it may be called.
        optional: A second copy of a parameter that stands elsewhere; it may be missing.
    """

    param: Param
    names: tuple[Spelling, ...]
    optional: bool = False


def chunk_params(
    params: list[Param], config: McaModelConfig, chunk: PipelineChunk, ep: int
) -> Iterator[Held]:
    """What ranks of expert rank ``ep`` hold of ``chunk``, as every tensor rank calls it."""
    share = (config.num_moe_experts or 0) // config.layout.ep
    mine = range(ep * share, (ep + 1) * share)
    first = chunk.layers[0] if chunk.layers else 0
    for param in params:
        if param.expert is not None and param.expert not in mine:
            continue
        held = _holds(param, config, chunk)
        if held is None:
            continue
        layer = param.layer
        if layer is not None and param.stage is Stage.LAYER:
            layer -= first
        expert = None if param.expert is None else param.expert - mine.start
        yield Held(param, tuple(_spell(param, layer, expert)), optional=held == "copy")


def _holds(param: Param, config: McaModelConfig, chunk: PipelineChunk) -> str | None:
    """Whether ``chunk`` holds ``param``, as its own or as a copy."""
    if param.stage is Stage.LAYER:
        return "own" if param.layer in chunk.layers else None
    if param.stage is Stage.MTP:
        return "own" if param.layer in chunk.mtp_layers else None
    if param.stage is Stage.FIRST:
        if chunk.has_embedding:
            return "own"
        return "copy" if chunk.mtp_layers or chunk.has_loss else None
    if param.alias_of is not None:
        return "copy" if chunk.has_loss else None
    if config.mtp_num_layers and param.mca.startswith(_FINAL_NORM):
        # Megatron puts it behind the last decoder layer, before the prediction layers
        return "own" if config.num_layers - 1 in chunk.layers else None
    return "own" if chunk.has_loss else None


def spellings(mca: str) -> list[str]:
    """The canonical name template ``mca`` and every other spelling of it, the canonical one first."""
    found = [mca]
    for canonical, other in _SPELLINGS:
        found += [name.replace(canonical, other) for name in found if canonical in name]
    return found


def _spell(param: Param, layer: int | None, expert: int | None) -> Iterator[Spelling]:
    def filled(template: str) -> str:
        return replace(param, mca=template, layer=layer, expert=expert).mca_name()

    for template in spellings(param.mca):
        yield Spelling(filled(template))
    for canonical, other in _GROUPED:
        if canonical in param.mca:
            for template in spellings(param.mca.replace(canonical, other)):
                yield Spelling(filled(template), expert)
