"""The state of an optimizer that is split over data-parallel ranks, as whole tensors of parameters.

A rank has a contiguous share of each bucket of parameters, so that most parameters lie on one rank whole, and those
over a border on few. Here a parameter's state is put together on the rank that has the most of it, and a rank asks for
the parameters of its share alone when it loads.

Megatron's own (``sharded_param_state_fully_reshardable``, megatron-core 0.16.1 and 0.19.2) gathers the whole bucket in
fp32 on every device and 12 bytes a parameter in the memory of every host process: of a model of 8B on 8 ranks 32 GB of
each GPU and 768 GB of the machine. It also cuts parameters out of what it gathered at positions that count the padding
of buckets, and so saves those behind a padded bucket shifted, without an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mca_models.megatron import platform
from mca_train.types import MegatronOptimizer, OptimizerState, Upstream

Shares = dict[int, tuple[int, int]]
"""By rank of the group: first element of a parameter, and the one after the last."""

_ADAM = ("exp_avg", "exp_avg_sq", "param")


@contextmanager
def per_parameter_states(optimizer: MegatronOptimizer) -> Iterator[None]:
    """A block in which the split optimizers of ``optimizer`` give their states so."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    split = [part for part in parts if hasattr(part, "gbuf_ranges")]
    try:
        for part in split:
            part.sharded_param_state_fully_reshardable = partial(states, part)
        yield
    finally:
        for part in split:
            vars(part).pop("sharded_param_state_fully_reshardable", None)


def states(
    optimizer: MegatronOptimizer, model: OptimizerState, is_loading: bool = False, metadata: object = None
) -> OptimizerState:
    """Of each parameter by its number what this rank writes, or with ``is_loading`` what it needs; collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded = {each.data: each for each in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    group, found, number = optimizer.data_parallel_group, {}, 0
    for buffer in optimizer.buffers:
        for param, (start, stop, bucket) in buffer.param_index_map.items():
            shares = bucket_shares(buffer.buckets[bucket], start, stop, group.size())
            if is_loading:
                whole = _empty_full(optimizer, param) if group.rank() in shares else {}
            else:
                whole = _gather_full(optimizer, param, shares)
            found[number] = {
                key: _sharded_tensor(sharded[param], key, tensor, optimizer.distributed_optimizer_instance_id)
                for key, tensor in whole.items()
            }
            number += 1
    return found


def bucket_shares(bucket: Upstream, start: int, stop: int, ranks: int) -> Shares:
    """Who has which part of the parameter between two places of the buffer."""
    each = bucket.grad_data.numel() // ranks
    start, stop = start - bucket.offset, stop - bucket.offset
    return {
        rank: (max(start, rank * each) - start, min(stop, (rank + 1) * each) - start)
        for rank in range(start // each, (stop - 1) // each + 1)
    }


def _gather_full(optimizer: MegatronOptimizer, param: nn.Parameter, shares: Shares) -> dict[str, Tensor]:
    """The whole state of a parameter on the rank that has most of it, in the host's memory; on others nothing."""
    group = optimizer.data_parallel_group
    me, owner = group.rank(), max(shares, key=lambda rank: shares[rank][1] - shares[rank][0])
    if me not in shares:
        return {}
    mine = _local_shards(optimizer, param)
    device = platform.current_device()
    if me != owner:
        sent = torch.stack([piece.to(device) for piece in mine.values()])
        _exchange([dist.P2POp(dist.isend, sent, dist.get_global_rank(group, owner), group)])
        return {}
    others = {rank: stop - start for rank, (start, stop) in shares.items() if rank != me}
    arrived = {rank: torch.empty(len(mine), size, device=device) for rank, size in others.items()}
    _exchange(
        [
            dist.P2POp(dist.irecv, box, dist.get_global_rank(group, rank), group)
            for rank, box in arrived.items()
        ]
    )
    found = {}
    for row, (key, piece) in enumerate(mine.items()):
        whole = torch.empty(param.numel())
        for rank, (start, stop) in shares.items():
            whole[start:stop] = piece if rank == me else arrived[rank][row]
        found[key] = whole.view(param.shape)
    return found


def _local_shards(optimizer: MegatronOptimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """This rank's part of a parameter's state, flat and in fp32, in the order of its names."""
    kept: Mapping[str, object] = optimizer._get_main_param_and_optimizer_states(param)
    held = local_shard(optimizer, param)
    if (
        held.dtype == torch.float32
    ):  # Transformer Engine's Adam does not update the main parameter of such a one
        kept = {**kept, "param": held}
    return {
        key: value.detach().reshape(-1).float()
        for key, value in sorted(kept.items())
        if isinstance(value, Tensor) and key != "step"
    }


def local_shard(optimizer: MegatronOptimizer, param: nn.Parameter) -> Tensor:
    """This rank's part of ``param`` as it stands in the groups of a split optimizer."""
    group, place = optimizer.model_param_group_index_map[param]
    found: Tensor = optimizer.optimizer.param_groups[group]["params"][place]
    return found


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _empty_full(optimizer: MegatronOptimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """Places for the whole state of a parameter, of which this rank needs a part."""
    keys = _local_shards(optimizer, param).keys() | {"param"}
    return {key: torch.empty(param.shape) for key in sorted(keys if len(keys) > 1 else _ADAM)}


def _sharded_tensor(like: Upstream, key: str, tensor: Tensor, instance: int) -> OptimizerState:
    """A tensor as the distributed checkpoint knows it; ``like`` is the parameter's own there."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    dtype = {} if isinstance(like, ShardedTensorFactory) else {"dtype": tensor.dtype}
    place = (*like.replica_id[:2], instance)
    return replace(like, key=f"optimizer.state.{key}.{like.key}", data=tensor, replica_id=place, **dtype)
