"""A bias on the logits, which Megatron's models do not have; its output layer can."""

import torch

from mca_models.megatron.layers.sharded import cut_parameter
from mca_models.megatron.types import GptModel


def add_output_bias(model: GptModel) -> None:
    """Gives a chunk's output layer, if it has one, a bias, cut as its weight is."""
    if hasattr(model, "output_layer"):
        layer = model.output_layer
        bias: torch.nn.Parameter = cut_parameter(
            (layer.output_size_per_partition,), model.config.params_dtype
        )
        layer.bias = bias
