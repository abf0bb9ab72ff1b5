"""Parameters of a pipeline chunk on this rank, and their names in its live modules.

Live names are generated from the rules of the family; none is parsed.
"""

from dataclasses import dataclass
from typing import Literal

from mca_config.layout import Coordinates, ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.templates import get_family
from mca_models.templates.live_names import (
    LOCAL_NORMS,
    MTP_LAYER,
    SEQUENTIAL_EXPERTS,
    is_in_chunk,
    live_name,
    local_experts,
    renamed_mtp_layer,
)
from mca_models.weights import Param, Stage

Implementation = Literal["transformer_engine", "local"]


@dataclass(frozen=True)
class NamingScheme:
    """Names of parameters in the live modules of this process.

    Args:
        implementation: Layer spec that they were built from.
        grouped_experts: One module has all experts of a rank (else one module per expert).
        mtp_layer: Megatron's name for the decoder layer inside an MTP layer.
    """

    implementation: Implementation
    grouped_experts: bool = False
    mtp_layer: str = MTP_LAYER

    def live(self, mca: str) -> str:
        """Convert the canonical name template ``mca`` to its live form; ``{layer}`` and ``{expert}`` stay."""
        table = dict(LOCAL_NORMS) if self.implementation == "local" else {}
        table |= {} if self.grouped_experts else SEQUENTIAL_EXPERTS
        table |= renamed_mtp_layer(self.mtp_layer)
        for canonical, live in table.items():
            mca = mca.replace(canonical, live)
        return mca


@dataclass(frozen=True)
class LocalParam:
    """Parameter of a chunk on this rank.

    Args:
        live: Its name in the live chunk.
        param: Its rule, with global layer and expert.
        copy: Second copy of a parameter with another chunk or name: loaded, never saved.
    """

    live: str
    param: Param
    copy: bool = False


def chunk_params(
    config: McaModelConfig,
    chunk: PipelineChunk,
    layout: ParallelLayout,
    coordinates: Coordinates,
    naming: NamingScheme,
) -> list[LocalParam]:
    """Return the parameters of ``chunk`` on the rank at ``coordinates``, in checkpoint order."""
    experts = local_experts(config, layout, coordinates.ep)
    found = []
    for param in get_family(config.model_type).params(config):
        copied = param.stage is Stage.FIRST and not chunk.has_embedding and bool(chunk.mtp_layers)
        if not (copied or is_in_chunk(param, config, chunk)):
            continue
        if param.expert is not None and param.expert not in experts:
            continue
        if param.alias_of is not None and chunk.has_embedding:
            continue  # the output layer uses the embedding's own tensor
        name = live_name(param, naming.live(param.mca), chunk, experts)
        found.append(LocalParam(name, param, copy=copied or param.alias_of is not None))
    return found
