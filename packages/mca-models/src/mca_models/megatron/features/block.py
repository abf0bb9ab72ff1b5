"""Transformer layers: attention parallel to the MLP or alone, factors on outputs, and other residuals.

Megatron's layer calls the norm before the MLP with the sum of residual and attention. In a parallel block that norm
reads the input of attention instead: the output of the norm before attention (one norm), or its input (two norms). The
MLP's output is added to the sum as usual.

In a residual stream of normed layer inputs (MiniMax-Text-01)

    x = norm(h)      h = a * x + b * attention(x)

the bias-dropout-add, by which Megatron adds the output of attention or MLP to the input of the norm before it, adds to
the norm's output instead.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import (
    Context,
    Feature,
    LayerContext,
    Setup,
    SpecChange,
    SpecChanges,
    norm_recompute_problems,
    remove_module,
)
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, Spec, WithBias

AddToResidual = Callable[..., Tensor]


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


def _no_addition(add: Spec) -> Spec:
    from megatron.core.transformer.identity_op import IdentityFuncOp

    return IdentityFuncOp


def _single_blocks(context: LayerContext) -> SpecChanges:
    """Return the changes that remove attention or MLP, with its norm, from layers without it."""
    fields: dict[str, SpecChange] = {}
    if context.number is None:
        return SpecChanges()
    if not context.config.has_attention(context.number):
        fields |= dict.fromkeys(("input_layernorm", "self_attention"), remove_module)
        fields["self_attn_bda"] = _no_addition
    if not context.config.has_mlp(context.number):
        fields |= dict.fromkeys(("pre_mlp_layernorm", "mlp"), remove_module)
        fields["mlp_bda"] = _no_addition
    return SpecChanges(fields)


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
        kept, added = self._factors
        inner = scaled_residual(self._add, added)(training, fused)

        def add(x_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            normal, self._saved = self._saved, None
            assert normal is not None, "Megatron calls the norm before it adds"
            return inner(x_with_bias, normal * kept, dropout)

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


def _normed_residual_problems(setup: Setup) -> Iterator[str]:
    if setup.recomputes("layernorm"):
        yield (
            "norms cannot be recomputed alone if the residual stream goes through them; remove layernorm from "
            "recompute_modules, or set recompute_granularity to full"
        )


PARALLEL_BLOCK = Feature(
    name="attention parallel to the MLP",
    enabled=lambda config: config.block.parallel_block != "none",
    problems=norm_recompute_problems,
    spec=_norm_before_mlp,
    finish=lambda model, config: connect_parallel_blocks(model),
)
SINGLE_BLOCKS = Feature(
    name="layers of attention or an MLP alone",
    enabled=lambda config: config.block.single_blocks,
    layer=_single_blocks,
)
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
NORMED_RESIDUAL = Feature(
    name="residual stream through the norms",
    enabled=lambda config: config.block.normed_residual,
    problems=_normed_residual_problems,
    finish=connect_residuals,
)
