"""Bias on the logits: Megatron's models have none, its output layer supports one."""

import torch

from mca_models.megatron.layers.sharded import cut_parameter
from mca_models.megatron.types import GptModel


def add_output_bias(model: GptModel) -> None:
    """Add a bias to a chunk's output layer, if it has one, sharded as its weight is."""
    if hasattr(model, "output_layer"):
        layer = model.output_layer
        bias: torch.nn.Parameter = cut_parameter(
            (layer.output_size_per_partition,), model.config.params_dtype
        )
        layer.bias = bias
