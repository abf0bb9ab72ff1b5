"""Constant factors on embeddings, residuals and logits; capped logits.

Capped attention scores are computed in `layers.sdpa`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import GptModel, WithBias

AddToResidual = Callable[..., Tensor]


def add_scales(model: GptModel, config: McaModelConfig) -> None:
    """Makes a chunk's embedding and output layer multiply by what ``config`` says, and cap the logits."""
    if config.embedding_multiplier != 1.0 and hasattr(model, "embedding"):
        factor = config.embedding_multiplier

        def scale_embedding(module: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
            # HF keeps the factor in the weights' dtype; the device makes it itself, and is not waited for
            return output * torch.full((), factor, dtype=output.dtype, device=output.device)

        model.embedding.register_forward_hook(scale_embedding)
    divisor, cap = config.logits_scaling, config.final_logit_softcapping
    if (divisor != 1.0 or cap is not None) and hasattr(model, "output_layer"):

        def scale_logits(module: torch.nn.Module, args: tuple[object, ...], output: WithBias) -> WithBias:
            logits, bias = output
            logits = logits / divisor
            return logits if cap is None else (logits / cap).tanh() * cap, bias

        model.output_layer.register_forward_hook(scale_logits)


def scaled_activation(
    activation: Callable[..., Tensor], factors: tuple[float, ...] | None
) -> Callable[..., Tensor]:
    """``activation`` with factors on the gate that it takes and on the output of the MLP, which is linear in it."""
    if factors is None:
        return activation
    of_gate, of_output = factors
    return partial(_scaled, activation, of_gate, of_output)


def _scaled(activation: Callable[..., Tensor], of_gate: float, of_output: float, gate: Tensor) -> Tensor:
    return activation(gate * of_gate) * of_output


def scaled_residual(
    add: Callable[[bool, bool], AddToResidual], factor: float
) -> Callable[[bool, bool], AddToResidual]:
    """Megatron's bias-dropout-add ``add`` with what it adds to the residual multiplied by ``factor``."""

    def get(training: bool, fused: bool) -> AddToResidual:
        inner = add(training, fused)

        def scaled(x_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            added: Tensor = inner((x * factor, None if bias is None else bias * factor), residual, dropout)
            return added

        return scaled

    return get
