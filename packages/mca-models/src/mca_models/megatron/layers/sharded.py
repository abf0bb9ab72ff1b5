"""Sharded state of mca's modules for Megatron's distributed checkpoints."""

from collections.abc import Mapping

import torch

from mca_models.megatron.types import MarkedParameter, ShardedState


def sharded_state(
    module: torch.nn.Module, prefix: str, offsets: tuple[object, ...], axes: Mapping[str, int]
) -> ShardedState:
    """Return the sharded tensors of a module; ``axes`` gives the axis of those that tensor ranks shard."""
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    sharded: ShardedState = make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        dict(axes),
        offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return sharded


def cut_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    """Return an empty parameter marked as a tensor-parallel shard on axis 0."""
    parameter: MarkedParameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    cut: torch.nn.Parameter = parameter
    return cut
