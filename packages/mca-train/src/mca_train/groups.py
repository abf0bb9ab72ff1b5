"""These functions ask Megatron's process groups where this rank stands, and sum and gather over ranks.

The groups themselves are made in `mca_models.megatron.distributed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.layout import ParallelLayout
from mca_models.megatron.distributed.collectives import all_gather

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank's place among the others."""

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
        """Return whether this rank speaks for the run: logs, progress bar, small files."""
        return self.rank == 0


def current_ranks(layout: ParallelLayout) -> Ranks:
    """This rank, in the process groups that stand."""
    from megatron.core import parallel_state

    from mca_models.megatron import platform

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
    """``values`` of the last pipeline stage, added over data- and context-parallel ranks, on every rank."""
    return _over_data(values, dist.ReduceOp.SUM)


def max_over_data(values: Tensor) -> Tensor:
    """Of each of ``values`` of the last pipeline stage the largest of those ranks, on every rank."""
    return _over_data(values, dist.ReduceOp.MAX)


def _over_data(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    from megatron.core import parallel_state

    values = values.clone()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(values, operation, group=group)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def sum_over_samples(values: Tensor) -> Tensor:
    """``values`` added over data- and context-parallel ranks; every rank of a model replica has the same."""
    total = values.clone()
    dist.all_reduce(total, group=data_group_with_context())
    return total


def sum_over_samples_on_host(values: Tensor) -> Tensor:
    """``values`` in the host's memory added as by `sum_over_samples`: nobody waits for what a GPU has yet to do."""
    from megatron.core import parallel_state

    total = values.clone()
    if data_group_with_context().size() > 1:
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo(with_context_parallel=True))
    return total


def sum_over_replicas(values: Tensor) -> Tensor:
    """``values`` of the last pipeline stage, of which each replica knows some and has 0 for the rest, on every rank."""
    from megatron.core import parallel_state

    speaks = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    speaks = speaks and parallel_state.get_tensor_model_parallel_rank() == 0
    speaks = speaks and parallel_state.get_context_parallel_rank() == 0
    total = values.clone() if speaks else torch.zeros_like(values)
    dist.all_reduce(total)
    return total


def data_group_with_context() -> ProcessGroup:
    """Ranks with the same part of the model."""
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest ``value`` of all ranks."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def gather_numbers(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """The ``numbers`` of each rank, which are equally many; every rank waits for all."""
    table = torch.zeros(ranks.world_size, len(numbers), dtype=torch.int64, device=ranks.device)
    table[ranks.rank] = torch.tensor(numbers)
    dist.all_reduce(table)
    found: list[list[int]] = table.tolist()
    return found


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def sum_over(values: Tensor, group: ProcessGroup) -> Tensor:
    """``values`` added over the ranks of ``group``."""
    total = values.clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def sum_over_stage(values: Tensor) -> Tensor:
    """``values`` added over all ranks of this pipeline stage."""
    return sum_over(values, _stage_group())


def max_over_stage(values: Tensor) -> Tensor:
    """Of each of ``values`` the largest of all ranks of this pipeline stage."""
    found = values.clone()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=_stage_group())
    return found


def is_stage_leader() -> bool:
    """Return whether this rank speaks for those of its pipeline stage."""
    return _stage_group().rank() == 0


def _stage_group() -> ProcessGroup:
    from megatron.core import parallel_state

    group: ProcessGroup = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group


def sequence_parallel_shard(values: Tensor, axis: int) -> Tensor:
    """The tokens of ``values`` that this tensor-parallel rank has under sequence parallelism."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    share: Tensor = values.chunk(ranks, axis)[parallel_state.get_tensor_model_parallel_rank()]
    return share.contiguous()


def gather_over_stages(value: T) -> list[T]:
    """``value`` of each pipeline stage."""
    from megatron.core import parallel_state

    return all_gather(value, parallel_state.get_pipeline_model_parallel_group())


def sum_over_context(values: Tensor) -> Tensor:
    """``values`` added over the ranks that share samples; each gets the gradient of its own."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return values + (total - values).detach()
