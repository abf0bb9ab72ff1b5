"""What our own modules tell Megatron's distributed checkpoint.

Nothing is written here.
"""

from collections.abc import Mapping

import torch

from mca_models.megatron.types import MarkedParameter, ShardedState


def sharded_state(
    module: torch.nn.Module, prefix: str, offsets: tuple[object, ...], axes: Mapping[str, int]
) -> ShardedState:
    """A module's own tensors; ``axes`` says which are cut over tensor ranks, and where."""
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
    """An empty parameter that Megatron takes for a share of one cut on axis 0."""
    parameter: MarkedParameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    cut: torch.nn.Parameter = parameter
    return cut
