"""xIELU activation (Apertus), with two trained scalars per layer."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mca_models.megatron.features.feature import Feature
from mca_models.megatron.layers.sharded import sharded_state
from mca_models.megatron.types import GptModel, MegatronConfig, ShardedState


class Xielu(torch.nn.Module):
    """``p x^2 + b x`` above 0, ``n (e^min(x, eps) - 1 - x) + b x`` below; the same on every tensor rank.

    p is softplus(alpha_p), n is b + softplus(alpha_n).
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.alpha_p = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        self.alpha_n = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        self.register_buffer("beta", torch.tensor([0.5], dtype=config.params_dtype))
        self.register_buffer("eps", torch.tensor([-1e-6], dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to this rank's channels; the scalars' gradients are summed over tensor ranks."""
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        positive = softplus(copy_to_tensor_model_parallel_region(self.alpha_p))
        negative = self.beta + softplus(copy_to_tensor_model_parallel_region(self.alpha_n))
        below = (torch.expm1(torch.min(x, self.eps)) - x) * negative
        return torch.where(x > 0, positive * x * x, below) + self.beta * x

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: ShardedState | None = None
    ) -> ShardedState:
        """Return the state for Megatron's distributed checkpoint."""
        return sharded_state(self, prefix, sharded_offsets, {})


def use_xielu(model: GptModel) -> None:
    """Set the activation of every MLP of a chunk."""
    for layer in model.decoder.layers:
        layer.mlp.activation_func = Xielu(model.config)


_START = {
    "alpha_p": math.log(math.expm1(0.8)),
    "alpha_n": math.log(math.expm1(0.3)),
    "beta": 0.5,
    "eps": -1e-6,
}
"""Initial weights of the activation xIELU by name."""


def _start(name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    return torch.full(shape, _START[name.rpartition(".")[2]]) if "activation_func." in name else None


XIELU = Feature(
    name="xIELU",
    enabled=lambda config: config.mlp.hidden_act == "xielu",
    start=_start,
    finish=lambda model, config: use_xielu(model),
)
