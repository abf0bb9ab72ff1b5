"""Norms where Megatron has none: over all heads of q or k together, and after a projection."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mca_models.megatron.layers.norm import Norm


class WideNorm(torch.nn.Module):
    """RMSNorm of all heads of a token together, which tensor ranks share out.

    Its weight has one number for each channel of each head of this rank.
    """

    heads = "num_attention_heads"

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.width = getattr(config, self.heads) * hidden_size
        share = self.width // config.tensor_model_parallel_size
        weight: Any = torch.nn.Parameter(torch.ones(share, dtype=config.params_dtype))
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., heads / tp, channels]``, normalised in fp32, in its own dtype."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        flat = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True))
        # every rank's output depends on the sum: its gradient is summed back
        mean = copy_to_tensor_model_parallel_region(squares) / self.width
        normal: Tensor = flat * torch.rsqrt(mean + self.eps) * self.weight.float()
        return normal.to(x.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoint: cut over tensor ranks."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return sharded


class WideKeyNorm(WideNorm):
    """``WideNorm`` of the keys."""

    heads = "num_query_groups"


@cache
def post_normed(linear: type) -> type:
    """A row-parallel linear class followed by a norm of its output, ``post_layernorm``."""

    class PostNormed(linear):  # type: ignore[misc]
        """The linear and the norm after it."""

        def __init__(self, input_size: int, output_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, *args, config=config, **kwargs)
            self.post_layernorm = Norm(config, output_size, eps=config.layernorm_epsilon)

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            """The normalised output, and the bias that the caller adds."""
            output, bias = super().forward(*args, **kwargs)
            return self.post_layernorm(output), bias

    return PostNormed
