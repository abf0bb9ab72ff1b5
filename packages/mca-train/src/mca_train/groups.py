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


def sum_over_samples(values: Tensor) -> Tensor:
    """``values`` added over data- and context-parallel ranks; every rank of a model replica has the same."""
    total = values.clone()
    dist.all_reduce(total, group=data_group_with_context())
    return total


def data_group_with_context() -> Any:
    """Ranks with the same part of the model."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def broadcast_object(value: Any) -> Any:
    """Rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's ``value``, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def largest(value: float, device: torch.device) -> float:
    """The largest ``value`` of all ranks."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def barrier() -> None:
    """Waits for every rank."""
    dist.barrier()


def num_replicas() -> int:
    """Data-parallel ranks, those that share samples counted once."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size())


def balancing_loss(total: Tensor, entry: dict[str, Any]) -> Tensor:
    """One of Megatron's auxiliary losses of this pipeline stage, from what each rank of the stage collected.

    Args:
        total: This rank's sums; overwritten.
        entry: Its groups, as Megatron's tracker names them.
    """
    from megatron.core import parallel_state

    if (group := entry.get("reduce_group")) is not None:
        dist.all_reduce(total, group=group)
    if (group := entry.get("avg_group")) is not None:
        dist.all_reduce(total, group=group)
        total /= group.size()
    if (
        entry.get("reduce_group") is None and entry.get("avg_group") is None
    ):  # the z-loss: of a rank's own tokens
        shared = parallel_state.get_tensor_and_context_parallel_group()
        dist.all_reduce(total, group=shared)
        total /= shared.size()
    needs_mean = not entry.get("reduce_group_has_dp", not entry.get("needs_dp_avg", True))
    if needs_mean:
        data = parallel_state.get_data_parallel_group()
        dist.all_reduce(total, group=data)
        total /= data.size()
    return total


def of_every_stage(value: Any) -> list[Any]:
    """``value`` of each pipeline stage."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    box: list[Any] = [None] * group.size()
    dist.all_gather_object(box, value, group=group)
    return box


def sum_over_context(values: Tensor) -> Tensor:
    """``values`` added over the ranks that share samples; each gets the gradient of its own."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return values + (total - values).detach()
