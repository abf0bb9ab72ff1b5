"""The replicated down-projection of multi-latent attention for the local spec.

Megatron's local spec cuts it by columns and gathers, whose backward never sums the gradient of the shared
rotary key over the tensor ranks. Replicated, it is what Transformer Engine's "duplicated" linear is.
"""

import torch
from torch import Tensor

from mca_models.megatron.layers.replicated import ReplicatedLinear


class DuplicatedLinear(ReplicatedLinear):
    """``ReplicatedLinear`` whose output may hold the rotary key that all heads share."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``[s, b, in]`` to ``[s, b, out]``, and no bias."""
        y, bias = super().forward(x)
        return self._summed_key(y), bias

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
