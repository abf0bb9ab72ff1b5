"""The replicated down-projection of multi-latent attention for the local spec.

Megatron's local spec cuts it by columns and gathers, whose backward never sums the gradient of the shared
rotary key over the tensor ranks. Replicated, it is what Transformer Engine's "duplicated" linear is.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from mca_models.megatron.types import MarkedParameter, MegatronConfig, ShardedState


class DuplicatedLinear(torch.nn.Module):
    """``x W^T`` with all of W on every tensor rank; a sequence-parallel input stays cut."""

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
        """``[s, b, in]`` to ``[s, b, out]``, and no bias."""
        return self._summed_key(linear(x, self.weight)), None

    def _summed_key(self, y: Tensor) -> Tensor:
        """Without sequence parallelism, has the rotary key's gradient summed over the tensor ranks.

        All heads share that key, and each tensor rank has the gradient of its own heads only.
        """
        config = self.config
        if config.tensor_model_parallel_size == 1 or config.sequence_parallel:
            return y
        if y.shape[-1] != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            return y
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        latent, key = torch.split(y, [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        return torch.cat([latent, copy_to_tensor_model_parallel_region(key)], -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """For Megatron's distributed checkpoint: replicated over tensor ranks."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        sharded: ShardedState = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return sharded
