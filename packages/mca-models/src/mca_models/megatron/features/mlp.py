"""MLPs: activation, gates and their factors; kernels that compute another activation; xIELU."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import softplus

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature, Setup
from mca_models.megatron.layers.sharded import ShardedModule
from mca_models.megatron.types import GptModel, MegatronConfig, Settings
from mca_models.templates.parts.moe import expert_sizes


class Xielu(ShardedModule):
    """``p x^2 + b x`` above 0, ``n (e^min(x, eps) - 1 - x) + b x`` below; the same on every tensor rank.

    p is softplus(alpha_p), n is b + softplus(alpha_n).
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.alpha_p = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        self.alpha_n = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        self.register_buffer("beta", torch.tensor([0.5], dtype=config.params_dtype))
        self.register_buffer("eps", torch.tensor([-1e-6], dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to this rank's channels; the scalars' gradients are summed over tensor ranks."""
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        positive = softplus(copy_to_tensor_model_parallel_region(self.alpha_p))
        negative = self.beta + softplus(copy_to_tensor_model_parallel_region(self.alpha_n))
        below = (torch.expm1(torch.min(x, self.eps)) - x) * negative
        return torch.where(x > 0, positive * x * x, below) + self.beta * x


def use_xielu(model: GptModel) -> None:
    """Set the activation of every MLP of a chunk."""
    for layer in model.decoder.layers:
        layer.mlp.activation_func = Xielu(model.config)


_START = {
    "alpha_p": math.log(math.expm1(0.8)),
    "alpha_n": math.log(math.expm1(0.3)),
    "beta": 0.5,
    "eps": -1e-6,
}
"""Initial weights of the activation xIELU by name."""


def _start(name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    return torch.full(shape, _START[name.rpartition(".")[2]]) if "activation_func." in name else None


XIELU = Feature(
    name="xIELU",
    enabled=lambda config: config.mlp.hidden_act == "xielu",
    start=_start,
    finish=lambda model, config: use_xielu(model),
)


_TANH_GELU = functools.partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "xielu": functional.silu,  # replaced once the layers are built
}


def has_fused_activation(config: McaModelConfig) -> bool:
    """Return whether Megatron has an exact fused activation for every MLP; the one for ``gelu`` is approximate."""
    if config.mlp.mlp_multipliers is not None:
        return False
    if config.mlp.hidden_act == "quick_gelu":  # fused for routed experts only
        dense = not all(config.is_moe_layer(i) for i in range(config.num_layers))
        moe = expert_sizes(config)
        return not dense and moe is not None and not moe.shared
    return config.mlp.hidden_act == "silu" and config.mlp.gated_linear_unit


def has_altered_glu(config: McaModelConfig) -> bool:
    """Return whether a gated MLP computes more than its activation times the other half."""
    clamped = config.mlp.activation_func_clamp_value is not None
    return clamped or bool(config.mlp.glu_linear_offset) or config.mlp.mlp_multipliers is not None


def _activation(name: str) -> Callable[..., Tensor]:
    if name == "relu2":
        from megatron.core.activations import squared_relu

        squared: Callable[..., Tensor] = squared_relu
        return squared
    if name == "quick_gelu":  # Megatron compares with its own function
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        function: Callable[..., Tensor] = quick_gelu
        return function
    if name not in _ACTIVATIONS:
        raise McaError(
            f"hidden_act {name!r} is not supported; supported: {', '.join((*_ACTIVATIONS, 'quick_gelu', 'relu2'))}"
        )
    return _ACTIVATIONS[name]


def scaled_activation(
    activation: Callable[..., Tensor], factors: tuple[float, ...] | None
) -> Callable[..., Tensor]:
    """Return ``activation`` with factors on its input gate and on its output, in which the MLP is linear."""
    if factors is None:
        return activation
    gate_factor, output_factor = factors
    return functools.partial(_scaled, activation, gate_factor, output_factor)


def _scaled(
    activation: Callable[..., Tensor], gate_factor: float, output_factor: float, gate: Tensor
) -> Tensor:
    return activation(gate * gate_factor) * output_factor


def _settings(config: McaModelConfig) -> Settings:
    mlp = config.mlp
    values: Settings = {
        "ffn_hidden_size": mlp.ffn_hidden_size,
        "gated_linear_unit": mlp.gated_linear_unit,
        "add_bias_linear": mlp.add_bias_linear,
        "activation_func": scaled_activation(_activation(mlp.hidden_act), mlp.mlp_multipliers),
        "activation_func_clamp_value": mlp.activation_func_clamp_value,
    }
    if mlp.glu_linear_offset:
        values["glu_linear_offset"] = mlp.glu_linear_offset
    if not has_fused_activation(config):
        values["bias_activation_fusion"] = False
    return values


def _problems(setup: Setup) -> Iterator[str]:
    """Yield problems of fused activations: Transformer Engine approximates gelu and treats ungated silu as ReLU."""
    config, settings = setup.config, setup.settings
    if settings.get("bias_activation_fusion") and not has_fused_activation(config):
        yield "bias_activation_fusion has no kernel for the MLPs of this model; remove it"
    swiglu = config.mlp.hidden_act == "silu" and config.mlp.gated_linear_unit and not has_altered_glu(config)
    for name in ("use_te_activation_func", "use_transformer_engine_op_fuser"):
        if settings.get(name) and not swiglu:
            yield f"{name} computes another activation than this model, whose MLPs are not plain gated silu; remove it"
    if setup.recomputes("mlp") and (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "recomputed MLPs are not split into chunks; remove mlp from recompute_modules, or "
            "mlp_chunks_for_training"
        )


MLP = Feature(name="MLP", enabled=lambda config: True, settings=_settings, problems=_problems)
