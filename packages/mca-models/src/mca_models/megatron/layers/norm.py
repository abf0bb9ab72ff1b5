"""RMSNorm and LayerNorm that know sequence parallelism and zero-centred weights.

Megatron's ``WrappedTorchNorm`` refuses both, and its RMSNorm weight is not marked for the gradient sum over
tensor ranks that sequence parallelism needs.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from mca_models.megatron.types import MarkedParameter, MegatronConfig


class Norm(torch.nn.Module):
    """Normalises the last axis in fp32, as ``config.normalization`` says.

    With ``layernorm_zero_centered_gamma`` the stored weight is the deviation from 1.
    """

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = self._parameter(config, 1.0 - self.offset)
        self.bias = self._parameter(config, 0.0) if config.normalization == "LayerNorm" else None

    def _parameter(self, config: MegatronConfig, value: float) -> torch.nn.Parameter:
        weight: MarkedParameter = torch.nn.Parameter(torch.full(self.shape, value, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        parameter: torch.nn.Parameter = weight
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised, in its own dtype."""
        weight = self.weight.float()
        if self.offset:
            weight = weight + self.offset
        if self.bias is None:
            return rms_norm(x.float(), self.shape, weight, self.eps).to(x.dtype)
        return layer_norm(x.float(), self.shape, weight, self.bias.float(), self.eps).to(x.dtype)
