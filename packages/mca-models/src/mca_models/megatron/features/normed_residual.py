"""Residual stream of normed layer inputs, with factors (MiniMax-Text-01).

    x = norm(h)      h = a * x + b * attention(x)

Megatron adds the output of attention or MLP to the input of the norm before it, by a bias-dropout-add that a layer
holds. In its place is a function that adds to the norm's output.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature, Setup
from mca_models.megatron.types import GptModel, WithBias

AddToResidual = Callable[..., Tensor]


class NormedResidual:
    """Bias-dropout-add whose residual is the output of a norm.

    Args:
        add: Megatron's own.
        norm: The norm before attention or MLP.
        factors: Factor on the residual, and on what is added.
    """

    def __init__(
        self, add: Callable[[bool, bool], AddToResidual], norm: torch.nn.Module, factors: tuple[float, float]
    ) -> None:
        self._add, self._factors = add, factors
        self._saved: Tensor | None = None
        norm.register_forward_hook(self._save)

    def _save(self, norm: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> None:
        self._saved = output

    def __call__(self, training: bool, fused: bool) -> AddToResidual:
        """Return the function that Megatron calls with an output, its bias and the residual."""
        inner, (kept, added) = self._add(training, fused), self._factors

        def add(x_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            normal, self._saved = self._saved, None
            assert normal is not None, "Megatron calls the norm before it adds"
            x, bias = x_with_bias
            return inner((x * added, None if bias is None else bias * added), normal * kept, dropout)

        return add


def connect_residuals(model: GptModel, config: McaModelConfig) -> None:
    """Replace the additions of every layer of a chunk."""
    block = config.block
    factors = [
        *zip(block.attention_residual_factors or (), block.attention_output_factors or (), strict=True)
    ]
    for layer in model.decoder.layers:
        attention = factors[layer.layer_number - 1]
        mlp = (block.mlp_residual_factor, block.mlp_output_factor)
        layer.self_attn_bda = NormedResidual(layer.self_attn_bda, layer.input_layernorm, attention)
        layer.mlp_bda = NormedResidual(layer.mlp_bda, layer.pre_mlp_layernorm, mlp)


def _problems(setup: Setup) -> Iterator[str]:
    if setup.recomputes("layernorm"):
        yield (
            "norms cannot be recomputed alone if the residual stream goes through them; remove layernorm from "
            "recompute_modules, or set recompute_granularity to full"
        )


NORMED_RESIDUAL = Feature(
    name="residual stream through the norms",
    enabled=lambda config: config.block.normed_residual,
    problems=_problems,
    finish=connect_residuals,
)
