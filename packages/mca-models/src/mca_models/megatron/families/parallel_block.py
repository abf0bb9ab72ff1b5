"""Attention and MLP side by side, on Megatron's layer, in which the MLP takes what attention was added to.

Megatron's layer calls the norm before the MLP with that sum. Here that norm looks at what attention was given
instead: the output of the norm before attention (one norm), or its input (two norms). What the MLP gives is added to
the sum, as ever.
"""

import torch
from torch import Tensor

from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.types import GptModel, MegatronConfig


class SharedNorm(torch.nn.Module):
    """Gives the MLP what the norm before attention gave attention."""

    saved: Tensor | None = None

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """What was kept, once."""
        saved, self.saved = self.saved, None
        return x if saved is None else saved

    def save_input(self, input_norm: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Called after the norm ``input_norm`` attention."""
        self.saved = output


def second_norm(norm: type[Norm]) -> type[Norm]:
    """A norm of its own before the MLP, of what the ``norm`` before attention normalised."""

    class SecondNorm(norm):  # type: ignore[misc, valid-type]
        """Normalises what was kept, whatever it is called with."""

        saved: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            """What was kept, normalised."""
            saved, self.saved = self.saved, None
            normal: Tensor = super().forward(x if saved is None else saved)
            return normal

        def save_input(self, input_norm: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            """Called after the norm ``input_norm`` attention."""
            self.saved = args[0]

    return SecondNorm


def connect_parallel_blocks(model: GptModel) -> None:
    """Has every layer of a chunk keep for its MLP what its attention is given."""
    for layer in model.decoder.layers:
        layer.input_layernorm.register_forward_hook(layer.pre_mlp_layernorm.save_input)
