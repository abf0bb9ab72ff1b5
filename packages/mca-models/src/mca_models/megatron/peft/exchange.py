"""Gather an adapter from all ranks on the first rank, or on all. Adapters are small enough to fit."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.lora import Adapter, AdapterConfig, AdapterRules
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.factory.fill import is_first_replica, shard_rank_and_size
from mca_models.megatron.tensors import to_numpy
from mca_models.weights import Param
from mca_models.weights.arrays import Array

Pieces = dict[str, dict[int, Array]]


def whole_adapter(
    live: Sequence[tuple[Param, Tensor]],
    rank_context: RankContext,
    model: McaModelConfig,
    config: AdapterConfig,
    rules: AdapterRules,
    *,
    everywhere: bool = False,
) -> Adapter | None:
    """Gather the adapter on rank 0, or ``everywhere``; None on other ranks. Collective."""
    mine: Pieces = {}
    for param, tensor in live:
        if is_first_replica(param, rank_context.coordinates):
            rank, _ = shard_rank_and_size(param, rank_context.layout, rank_context.coordinates)
            mine.setdefault(param.mca_name(), {})[rank] = to_numpy(tensor)
    everyone: list[Pieces] | None = [{}] * rank_context.world_size if rank_context.rank == 0 else None
    if everywhere:
        everyone = all_gather(mine)
    else:
        torch.distributed.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return None
    pieces: Pieces = {}
    for part in everyone:
        for name, ranks in part.items():
            pieces.setdefault(name, {}).update(ranks)
    return Adapter(model, config, rules, lambda param: _join(param, pieces[param.mca_name()], model))


def _join(param: Param, pieces: Mapping[int, Array], model: McaModelConfig) -> Array:
    whole = param.shard.join([pieces[rank] for rank in sorted(pieces)])
    return whole[: model.vocab_size] if param.vocab else whole
