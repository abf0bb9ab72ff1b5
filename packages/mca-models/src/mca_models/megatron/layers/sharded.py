"""Sharded state of mca's modules for Megatron's distributed checkpoints, and a linear with a replicated weight."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from mca_config.types import Typed
from mca_models.megatron.types import MarkedParameter, MegatronConfig, ShardedState


class ShardedModule(torch.nn.Module):
    """Base of modules with a state for Megatron's distributed checkpoints.

    Attributes:
        axes: Axis of each tensor that tensor ranks shard; others are replicated.
    """

    axes: ClassVar[Mapping[str, int]] = {}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: Typed = None
    ) -> ShardedState:
        """Return the state for Megatron's distributed checkpoint."""
        return sharded_state(self, prefix, sharded_offsets, self.axes)


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


def replicated_parameter(values: Tensor, config: MegatronConfig) -> torch.nn.Parameter:
    """Return a replicated parameter, whose gradient Megatron sums over sequence-parallel ranks."""
    parameter: MarkedParameter = torch.nn.Parameter(values)
    parameter.sequence_parallel = config.sequence_parallel
    replicated: torch.nn.Parameter = parameter
    return replicated


class ReplicatedLinear(ShardedModule):
    """``x W^T`` with the full W on every tensor rank; a sequence-parallel input stays sharded."""

    def __init__(self, input_size: int, output_size: int, *, config: MegatronConfig, **_: object) -> None:
        super().__init__()
        self.config = config
        self.weight = replicated_parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype), config
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map ``[..., in]`` to ``[..., out]``; the bias is None."""
        return linear(x, self.weight), None
