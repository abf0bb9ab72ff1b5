"""What the trainer asks of Megatron's process groups. The only file of the package that reads its global state."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mca_config.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank's place among the others."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    context_parallel_rank: int
    layout: ParallelLayout
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run: logs, progress bar, small files."""
        return self.rank == 0


def here(layout: ParallelLayout) -> Ranks:
    """This rank, in the process groups that stand."""
    from megatron.core import parallel_state

    from mca_models.megatron import platform

    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        layout=layout,
        device=platform.current_device(),
    )


def sum_over_data(values: Tensor) -> Tensor:
    """``values`` of the last pipeline stage, added over data- and context-parallel ranks, on every rank."""
    from megatron.core import parallel_state

    values = values.clone()
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def data_group_with_context() -> Any:
    """Ranks with the same part of the model."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def broadcast_object(value: Any) -> Any:
    """Rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Waits for every rank."""
    dist.barrier()
