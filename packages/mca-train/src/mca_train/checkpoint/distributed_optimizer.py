"""State of Megatron's distributed optimizer, as full tensors of parameters.

A rank has a contiguous shard of each bucket, so most parameters are on one rank and those across a border on few. The
rank with the largest shard of a parameter assembles its state. When loading, a rank requests only the parameters of its
shard.

Megatron's own method (``sharded_param_state_fully_reshardable``, megatron-core 0.16.1 and 0.19.2) gathers the full
bucket in fp32 on every device and 12 bytes per parameter in the memory of every host process: for an 8B model on 8
ranks 32 GB of each GPU and 768 GB of the machine. It also slices parameters at positions that include the padding of
buckets, and so saves those after a padded bucket shifted, without an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mca_models.megatron import platform
from mca_train.engine.offload import singles
from mca_train.types import MegatronOptimizer, OptimizerState, Upstream

Shares = dict[int, tuple[int, int]]
"""Start and stop of a parameter's elements, by rank of the group."""

_ADAM = ("exp_avg", "exp_avg_sq", "param")


@contextmanager
def per_parameter_states(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Replace the state method of distributed optimizers by `states` within the block."""
    split = [part for part in singles(optimizer) if hasattr(part, "gbuf_ranges")]
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
    """Return the state that this rank writes, or with ``is_loading`` needs, by parameter number; collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    group, result, number = optimizer.data_parallel_group, {}, 0
    for buffer in optimizer.buffers:
        for param, (start, stop, bucket) in buffer.param_index_map.items():
            shares = bucket_shares(buffer.buckets[bucket], start, stop, group.size())
            if is_loading:
                whole = _empty_full(optimizer, param) if group.rank() in shares else {}
            else:
                whole = _gather_full(optimizer, param, shares)
            result[number] = {
                key: _sharded_tensor(sharded[param], key, tensor, optimizer.distributed_optimizer_instance_id)
                for key, tensor in whole.items()
            }
            number += 1
    return result


def bucket_shares(bucket: Upstream, start: int, stop: int, ranks: int) -> Shares:
    """Return each rank's share of the parameter between two positions of the buffer."""
    size = bucket.grad_data.numel() // ranks
    start, stop = start - bucket.offset, stop - bucket.offset
    return {
        rank: (max(start, rank * size) - start, min(stop, (rank + 1) * size) - start)
        for rank in range(start // size, (stop - 1) // size + 1)
    }


def _gather_full(optimizer: MegatronOptimizer, param: nn.Parameter, shares: Shares) -> dict[str, Tensor]:
    """Return a parameter's full state in host memory on the rank with the largest shard; empty on others."""
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
    """Return this rank's shard of a parameter's state, flat fp32 tensors sorted by name."""
    kept: Mapping[str, object] = optimizer._get_main_param_and_optimizer_states(param)
    held = local_shard(optimizer, param)
    if held.dtype == torch.float32:  # Transformer Engine's Adam does not update their main parameters
        kept = {**kept, "param": held}
    return {
        key: value.detach().reshape(-1).float()
        for key, value in sorted(kept.items())
        if isinstance(value, Tensor) and key != "step"
    }


def local_shard(optimizer: MegatronOptimizer, param: nn.Parameter) -> Tensor:
    """Return this rank's shard of ``param`` in the distributed optimizer's groups."""
    group, index = optimizer.model_param_group_index_map[param]
    shard: Tensor = optimizer.optimizer.param_groups[group]["params"][index]
    return shard


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _empty_full(optimizer: MegatronOptimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """Return empty full tensors for the state of a parameter of which this rank needs a shard."""
    keys = _local_shards(optimizer, param).keys() | {"param"}
    return {key: torch.empty(param.shape) for key in sorted(keys if len(keys) > 1 else _ADAM)}


def _sharded_tensor(like: Upstream, key: str, tensor: Tensor, instance: int) -> OptimizerState:
    """Return a tensor for the distributed checkpoint; ``like`` is the parameter's own entry."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    dtype = {} if isinstance(like, ShardedTensorFactory) else {"dtype": tensor.dtype}
    place = (*like.replica_id[:2], instance)
    return replace(like, key=f"optimizer.state.{key}.{like.key}", data=tensor, replica_id=place, **dtype)
