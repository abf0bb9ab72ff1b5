"""Linear with a replicated weight on every tensor rank."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from mca_models.megatron.layers.sharded import sharded_state
from mca_models.megatron.types import MarkedParameter, MegatronConfig, ShardedState


class ReplicatedLinear(torch.nn.Module):
    """``x W^T`` with the full W on every tensor rank; a sequence-parallel input stays sharded."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: MegatronConfig,
        init_method: Callable[[Tensor], object],
        **_: object,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # with sequence parallelism each tensor rank sees its own tokens: Megatron sums the gradients
        weight: MarkedParameter = self.weight
        weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map ``[..., in]`` to ``[..., out]``; the bias is None."""
        return linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """Return the state for Megatron's distributed checkpoint, replicated over tensor ranks."""
        return sharded_state(self, prefix, sharded_offsets, {})
