"""Factors on the outputs of attention and MLP, and on those of layers."""

from collections.abc import Callable

import torch
from torch import Tensor

from mca_models.megatron.features.feature import Context, Feature, SpecChanges
from mca_models.megatron.types import GptModel, MegatronModule, WithBias

AddToResidual = Callable[..., Tensor]


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


def _residual_multiplier(context: Context) -> SpecChanges:
    factor = context.config.block.residual_multiplier
    return SpecChanges(dict.fromkeys(("self_attn_bda", "mlp_bda"), lambda add: scaled_residual(add, factor)))


RESIDUAL_MULTIPLIER = Feature(
    name="factor on the outputs of attention and MLP",
    enabled=lambda config: config.block.residual_multiplier != 1.0,
    spec=_residual_multiplier,
)
LAYER_SCALARS = Feature(
    name="factors on layers",
    enabled=lambda config: config.block.layer_scalar,
    finish=lambda model, config: add_layer_scalars(model),
)
