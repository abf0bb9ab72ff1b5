"""Parallel attention and MLP on Megatron's layer, whose MLP takes the output of attention.

Megatron's layer calls the norm before the MLP with the sum of residual and attention. Here that norm reads the input
of attention instead: the output of the norm before attention (one norm), or its input (two norms). The MLP's output
is added to the sum as usual.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from mca_models.megatron.features.feature import Context, Feature, Setup, SpecChanges
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.types import GptModel, MegatronConfig


class SharedNorm(torch.nn.Module):
    """Placeholder for the norm before the MLP that passes on the output of the norm before attention."""

    saved: Tensor | None = None

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return the saved tensor, once."""
        saved, self.saved = self.saved, None
        return x if saved is None else saved

    def save_input(self, input_norm: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Save the output of the norm before attention; a forward hook."""
        self.saved = output


@cache
def second_norm(norm: type[Norm]) -> type[Norm]:
    """Return a norm class for the MLP that reads the input of the norm before attention."""

    class SecondNorm(norm):  # type: ignore[misc, valid-type]
        """Norm of the saved tensor, which ignores its argument."""

        saved: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            """Return the saved tensor, normalized."""
            saved, self.saved = self.saved, None
            normal: Tensor = super().forward(x if saved is None else saved)
            return normal

        def save_input(self, input_norm: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            """Save the input of the norm before attention; a forward hook."""
            self.saved = args[0]

    return SecondNorm


def connect_parallel_blocks(model: GptModel) -> None:
    """Save the input of attention for the MLP in every layer of a chunk."""
    for layer in model.decoder.layers:
        layer.input_layernorm.register_forward_hook(layer.pre_mlp_layernorm.save_input)


def _norm_before_mlp(context: Context) -> SpecChanges:
    if context.config.block.parallel_block == "one_norm":
        return SpecChanges({"pre_mlp_layernorm": lambda norm: SharedNorm})
    return SpecChanges({"pre_mlp_layernorm": second_norm})


def _problems(setup: Setup) -> Iterator[str]:
    if setup.recomputes("layernorm"):
        yield (
            "norms cannot be recomputed alone if attention and MLP, or MLP and experts, are parallel; "
            "remove layernorm from recompute_modules, or set recompute_granularity to full"
        )


PARALLEL_BLOCK = Feature(
    name="attention parallel to the MLP",
    enabled=lambda config: config.block.parallel_block != "none",
    problems=_problems,
    spec=_norm_before_mlp,
    finish=lambda model, config: connect_parallel_blocks(model),
)
