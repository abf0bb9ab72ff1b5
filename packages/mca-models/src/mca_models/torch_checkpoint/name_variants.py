"""Names that Megatron's live modules may give the parameters of one pipeline chunk on one expert rank.

A chunk's file does not say which layer spec and which release wrote it. Every spelling that a release in our range
has is generated here from the family's rules; a name in a file is then looked up, never taken apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.templates.live_names import (
    LOCAL_NORMS,
    SEQUENTIAL_EXPERTS,
    is_in_chunk,
    live_name,
    local_experts,
    renamed_mtp_layer,
)
from mca_models.weights import Param, Stage

_SPELLINGS = {
    **LOCAL_NORMS,
    **SEQUENTIAL_EXPERTS,
    **renamed_mtp_layer("mtp_model_layer"),  # megatron-core 0.17 and later; the checkpoints kept the old name
}

_GROUPED = {
    "mlp.experts.linear_fc1.weight{expert}": "mlp.experts.weight1",
    "mlp.experts.linear_fc2.weight{expert}": "mlp.experts.weight2",
}


class NameVariant(NamedTuple):
    """One name that a parameter may have in a file."""

    name: str
    expert: int | None = None
    """Index of the expert, from 0, if one tensor holds all experts of a rank."""


@dataclass(frozen=True)
class NamedParam:
    """A parameter that a chunk's file holds.

    Args:
        param: Its rule, with global layer and expert.
        names: What it may be called.
        optional: A second copy of a parameter; it may be missing.
    """

    param: Param
    names: tuple[NameVariant, ...]
    optional: bool = False


def named_params(
    params: list[Param], config: McaModelConfig, chunk: PipelineChunk, ep: int
) -> Iterator[NamedParam]:
    """Yield the parameters of ``chunk`` on expert rank ``ep``, as every tensor rank names them."""
    mine = local_experts(config, config.layout, ep)
    for param in params:
        if param.expert is not None and param.expert not in mine:
            continue
        copy = _is_copy(param, chunk)
        if copy or (param.alias_of is None and is_in_chunk(param, config, chunk)):
            yield NamedParam(param, tuple(_names(param, chunk, mine)), optional=copy)


def _is_copy(param: Param, chunk: PipelineChunk) -> bool:
    """Return whether ``chunk`` may hold a copy of ``param``: an embedding for MTP layers, or a tied head."""
    if param.stage is Stage.FIRST:
        return not chunk.has_embedding and (bool(chunk.mtp_layers) or chunk.has_loss)
    return param.alias_of is not None and chunk.has_loss


def name_variants(mca: str) -> list[str]:
    """The canonical name template ``mca`` and every other spelling of it, the canonical one first."""
    found = [mca]
    for canonical, other in _SPELLINGS.items():
        found += [name.replace(canonical, other) for name in found if canonical in name]
    return found


def _names(param: Param, chunk: PipelineChunk, experts: range) -> Iterator[NameVariant]:
    for template in name_variants(param.mca):
        yield NameVariant(live_name(param, template, chunk, experts))
    for canonical, other in _GROUPED.items():
        if canonical in param.mca and param.expert is not None:
            for template in name_variants(param.mca.replace(canonical, other)):
                yield NameVariant(live_name(param, template, chunk, experts), param.expert - experts.start)
