"""Scalar factor on the output of each layer, stored with the weights and not trained."""

import torch
from torch import Tensor

from mca_models.megatron.types import GptModel, MegatronModule


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
