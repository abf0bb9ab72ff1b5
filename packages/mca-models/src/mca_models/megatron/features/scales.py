"""Factors on embeddings, residuals, layers and logits; capped logits and their bias.

Capped attention scores are in `layers.sdpa`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Context, Feature, SpecChanges
from mca_models.megatron.layers.sharded import cut_parameter
from mca_models.megatron.types import GptModel, MegatronModule, WithBias

AddToResidual = Callable[..., Tensor]


def add_scales(model: GptModel, config: McaModelConfig) -> None:
    """Scale a chunk's embedding and logits, and cap the logits."""
    if config.embedding.embedding_multiplier != 1.0 and hasattr(model, "embedding"):
        factor = config.embedding.embedding_multiplier

        def scale_embedding(module: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
            # HF rounds the factor to the weights' dtype; made on the device to avoid a synchronisation
            return output * torch.full((), factor, dtype=output.dtype, device=output.device)

        model.embedding.register_forward_hook(scale_embedding)
    divisor, cap = config.head.logits_scaling, config.head.final_logit_softcapping
    if (divisor != 1.0 or cap is not None) and hasattr(model, "output_layer"):

        def scale_logits(module: torch.nn.Module, args: tuple[object, ...], output: WithBias) -> WithBias:
            logits, bias = output
            logits = logits / divisor
            return logits if cap is None else (logits / cap).tanh() * cap, bias

        model.output_layer.register_forward_hook(scale_logits)


def scaled_activation(
    activation: Callable[..., Tensor], factors: tuple[float, ...] | None
) -> Callable[..., Tensor]:
    """Return ``activation`` with factors on its input gate and on its output, in which the MLP is linear."""
    if factors is None:
        return activation
    gate_factor, output_factor = factors
    return partial(_scaled, activation, gate_factor, output_factor)


def _scaled(
    activation: Callable[..., Tensor], gate_factor: float, output_factor: float, gate: Tensor
) -> Tensor:
    return activation(gate * gate_factor) * output_factor


def scaled_residual(
    add: Callable[[bool, bool], AddToResidual], factor: float
) -> Callable[[bool, bool], AddToResidual]:
    """Return Megatron's bias-dropout-add ``add`` with a ``factor`` on what it adds to the residual."""

    def get(training: bool, fused: bool) -> AddToResidual:
        inner = add(training, fused)

        def scaled(x_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            added: Tensor = inner((x * factor, None if bias is None else bias * factor), residual, dropout)
            return added

        return scaled

    return get


def add_layer_scalars(model: GptModel) -> None:
    """Add the factor to every decoder layer of a chunk."""
    for layer in model.decoder.layers:
        layer.register_buffer("layer_scalar", torch.ones(1, dtype=model.config.params_dtype))
        layer.register_forward_hook(_scale_output)


def _scale_output(
    layer: MegatronModule, args: tuple[object, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    hidden, context = output
    return hidden * layer.layer_scalar, context


def add_output_bias(model: GptModel) -> None:
    """Add a bias to a chunk's output layer, if it has one, sharded as its weight is."""
    if hasattr(model, "output_layer"):
        layer = model.output_layer
        bias: torch.nn.Parameter = cut_parameter(
            (layer.output_size_per_partition,), model.config.params_dtype
        )
        layer.bias = bias


def _residual_multiplier(context: Context) -> SpecChanges:
    factor = context.config.block.residual_multiplier
    return SpecChanges(dict.fromkeys(("self_attn_bda", "mlp_bda"), lambda add: scaled_residual(add, factor)))


RESIDUAL_MULTIPLIER = Feature(
    name="factor on the outputs of attention and MLP",
    enabled=lambda config: config.block.residual_multiplier != 1.0,
    spec=_residual_multiplier,
)
OUTPUT_BIAS = Feature(
    name="bias of the logits",
    enabled=lambda config: config.head.output_bias and config.head.num_labels is None,
    finish=lambda model, config: add_output_bias(model),
)
SCALES = Feature(name="factors on embeddings and logits", enabled=lambda config: True, finish=add_scales)
LAYER_SCALARS = Feature(
    name="factors on layers",
    enabled=lambda config: config.block.layer_scalar,
    finish=lambda model, config: add_layer_scalars(model),
)
