"""RMSNorm and LayerNorm with sequence parallelism and zero-centered weights.

Megatron's ``WrappedTorchNorm`` supports neither, and its RMSNorm weight is not marked for the gradient sum over tensor
ranks that sequence parallelism needs.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from mca_models.megatron.layers.sharded import replicated_parameter
from mca_models.megatron.types import MegatronConfig


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm (``config.normalization``) of the last axis in fp32.

    With ``layernorm_zero_centered_gamma`` the stored weight is the deviation from 1.
    """

    has_weight, has_bias = True, True

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.centred = config.normalization == "LayerNorm"
        if self.has_weight:
            self.weight = self._parameter(config, 1.0 - self.offset)
        else:
            self.register_parameter("weight", None)
        self.bias = self._parameter(config, 0.0) if self.centred and self.has_bias else None

    def _parameter(self, config: MegatronConfig, value: float) -> torch.nn.Parameter:
        return replicated_parameter(torch.full(self.shape, value, dtype=config.params_dtype), config)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``; return its dtype."""
        weight = self.weight.float() + self.offset if self.has_weight else None
        return self.normal(x.float(), weight).to(x.dtype)

    def normal(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalize ``x`` and multiply it by ``weight``."""
        if not self.centred:
            return rms_norm(x, self.shape, weight, self.eps)
        return layer_norm(x, self.shape, weight, None if self.bias is None else self.bias.float(), self.eps)


@cache
def norm_with(*, weight: bool, bias: bool) -> type[Norm]:
    """Return a ``Norm`` class with or without a weight, and a bias if it is a LayerNorm."""
    return type("ConfiguredNorm", (Norm,), {"has_weight": weight, "has_bias": bias and weight})
