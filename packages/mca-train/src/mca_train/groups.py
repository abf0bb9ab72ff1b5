"""Collectives over Megatron's process groups, and the indices of this rank in them.

`mca_models.megatron.distributed` creates the groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.layout import ParallelLayout
from mca_models.megatron import platform
from mca_models.megatron.distributed.collectives import all_gather

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Indices of this rank in the process groups."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    context_parallel_rank: int
    pipeline_rank: int
    layout: ParallelLayout
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank has the embedding, and the vision model if there is one."""
        return self.pipeline_rank == 0

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes logs, progress bar and small files of the run."""
        return self.rank == 0


def current_ranks(layout: ParallelLayout) -> Ranks:
    """Return the indices of this rank in the initialized process groups."""
    from megatron.core import parallel_state

    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        layout=layout,
        device=platform.current_device(),
    )


def sum_over_data(values: Tensor) -> Tensor:
    """Sum ``values`` of the last pipeline stage over data- and context-parallel ranks; every rank gets the result."""
    return _over_data(values, dist.ReduceOp.SUM)


def max_over_data(values: Tensor) -> Tensor:
    """Return the elementwise maximum of ``values`` of the last pipeline stage, over the ranks of `sum_over_data`."""
    return _over_data(values, dist.ReduceOp.MAX)


def _over_data(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    from megatron.core import parallel_state

    values = values.clone()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(values, operation, group=group)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def sum_over_samples_on_host(values: Tensor) -> Tensor:
    """Sum ``values`` in host memory over data- and context-parallel ranks, by gloo and without waiting for the GPU.

    All ranks of a model replica must have equal values.
    """
    from megatron.core import parallel_state

    total = values.clone()
    if data_group_with_context().size() > 1:
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo(with_context_parallel=True))
    return total


def sum_over_replicas(values: Tensor) -> Tensor:
    """Sum ``values`` of the last pipeline stage, in which each replica has some entries and 0 for the rest."""
    from megatron.core import parallel_state

    contributes = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    contributes = contributes and parallel_state.get_tensor_model_parallel_rank() == 0
    contributes = contributes and parallel_state.get_context_parallel_rank() == 0
    total = values.clone() if contributes else torch.zeros_like(values)
    dist.all_reduce(total)
    return total


def data_group_with_context() -> ProcessGroup:
    """Return the data-parallel group with context parallelism: the ranks with the same shards."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest ``value`` of all ranks."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def gather_numbers(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """Return the ``numbers`` of every rank, which all have the same length; collective."""
    table = torch.zeros(ranks.world_size, len(numbers), dtype=torch.int64, device=ranks.device)
    table[ranks.rank] = torch.tensor(numbers)
    dist.all_reduce(table)
    rows: list[list[int]] = table.tolist()
    return rows


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def sum_over(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``values`` over the ranks of ``group``."""
    total = values.clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def sum_over_stage(values: Tensor) -> Tensor:
    """Sum ``values`` over all ranks of this pipeline stage."""
    return sum_over(values, _stage_group())


def max_over_stage(values: Tensor) -> Tensor:
    """Return the elementwise maximum of ``values`` over all ranks of this pipeline stage."""
    maximum = values.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=_stage_group())
    return maximum


def is_stage_leader() -> bool:
    """Return whether this is the first rank of its pipeline stage."""
    return _stage_group().rank() == 0


def _stage_group() -> ProcessGroup:
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group


def sequence_parallel_shard(values: Tensor, axis: int) -> Tensor:
    """Return the tokens of ``values`` that this tensor-parallel rank has with sequence parallelism."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    share: Tensor = values.chunk(ranks, axis)[parallel_state.get_tensor_model_parallel_rank()]
    return share.contiguous()


def gather_over_stages(value: T) -> list[T]:
    """Return the ``value`` of each pipeline stage."""
    from megatron.core import parallel_state

    return all_gather(value, parallel_state.get_pipeline_model_parallel_group())


def sum_over_context(values: Tensor) -> Tensor:
    """Sum ``values`` over context-parallel ranks; the gradient goes to this rank's values only."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return values + (total - values).detach()
