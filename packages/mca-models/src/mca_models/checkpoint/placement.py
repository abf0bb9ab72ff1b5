"""Placement of parameter shards in the files of an MCA checkpoint.

    pp_PPP/tp_TT.safetensors            dense parameters of pipeline rank PPP, tensor rank TT
    pp_PPP/ep_EEE_etp_TT.safetensors    its experts, by expert and expert-tensor rank

Every shard is stored once: a replicated parameter in the file of tensor rank 0, a tied output
layer (``alias_of``) nowhere.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelinePlan
from mca_models.weights import Param, Stage


@cache
def dense_file(pp: int, tp: int) -> str:
    """The file of the dense pieces that ranks (``pp``, ``tp``) hold, relative to the iteration."""
    return f"pp_{pp:03d}/tp_{tp:02d}.safetensors"


@cache
def expert_file(pp: int, ep: int, etp: int) -> str:
    """The file of the expert pieces that ranks (``pp``, ``ep``, ``etp``) hold."""
    return f"pp_{pp:03d}/ep_{ep:03d}_etp_{etp:02d}.safetensors"


def pipeline_stage(param: Param, plan: PipelinePlan) -> int:
    """The pipeline rank that holds ``param``."""
    if param.stage in (Stage.FIRST, Stage.VISION):
        return plan.first.pp
    if param.stage is Stage.NORM:
        return plan.final_norm.pp
    if param.stage in (Stage.LAST, Stage.PASSTHROUGH):
        return plan.last.pp
    if param.layer is None:
        raise ValueError(f"{param.mca}: a parameter of stage {param.stage} needs a layer")
    chunk = plan.mtp_chunk if param.stage is Stage.MTP else plan.layer_chunk
    return chunk(param.layer).pp


def shard_count(param: Param, layout: ParallelLayout) -> int:
    """Return the number of ranks that ``param`` is sharded over: etp for an expert, else tp; 1 if replicated."""
    if param.shard.axis is None:
        return 1
    return layout.tp if param.expert is None else layout.etp


def expert_rank(param: Param, config: McaModelConfig) -> int:
    """The expert-parallel rank that holds ``param``, an expert's."""
    if param.expert is None:
        raise ValueError(f"{param.mca_name()} is no expert's")
    count = config.num_experts
    if count % config.layout.ep:
        raise McaError(
            f"{count} experts do not divide by --expert_model_parallel_size {config.layout.ep}; choose a divisor"
        )
    return param.expert // (count // config.layout.ep)


def shard_files(param: Param, config: McaModelConfig, plan: PipelinePlan) -> tuple[str, ...]:
    """The files that hold the pieces of ``param``, in the order of the ranks it is cut over."""
    pp, size = pipeline_stage(param, plan), shard_count(param, config.layout)
    if param.expert is None:
        return tuple(dense_file(pp, tp) for tp in range(size))
    ep = expert_rank(param, config)
    return tuple(expert_file(pp, ep, etp) for etp in range(size))


def stored_params(params: Iterable[Param]) -> list[Param]:
    """Return the parameters that a checkpoint stores: all but aliases."""
    return [param for param in params if param.alias_of is None]


def shards_by_file(params: Sequence[Param], config: McaModelConfig) -> dict[str, list[tuple[Param, int]]]:
    """Every file of the checkpoint with the pieces in it: (parameter, rank it is cut for), in stored order."""
    plan, files = config.pipeline_plan(), dict[str, list[tuple[Param, int]]]()
    for param in stored_params(params):
        for rank, file in enumerate(shard_files(param, config, plan)):
            files.setdefault(file, []).append((param, rank))
    return dict(sorted(files.items()))
