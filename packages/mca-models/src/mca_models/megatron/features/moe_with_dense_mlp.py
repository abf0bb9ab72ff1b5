"""MoE layer parallel to a dense MLP (Gemma 4), each with its own norms before and after it.

Megatron's MoE layer computes both, the MLP as a shared expert. The norm before the layer is removed, because the router
reads the input without it.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_models.megatron.features.feature import (
    Context,
    Feature,
    Setup,
    SpecChanges,
    change_moe_layer,
    remove_module,
    shared_expert_overlap_problems,
)
from mca_models.megatron.features.norms import PostNorm
from mca_models.megatron.layers.sharded import replicated_parameter
from mca_models.megatron.types import MegatronConfig


@cache
def with_dense_mlp(expert_layer: type) -> type:
    """Return an MoE layer class with these norms, and with router scales on its input and on the chosen experts."""

    class MoEWithDenseMlp(expert_layer):  # type: ignore[misc]
        """Sum of a dense MLP and routed experts."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            size, epsilon = config.hidden_size, config.layernorm_epsilon
            self.dense_layernorm, self.dense_post_layernorm = _norms(config)
            self.experts_layernorm, self.experts_post_layernorm = _norms(config)
            self.epsilon = epsilon
            self.router_scale = replicated_parameter(torch.ones(size, dtype=config.params_dtype), config)
            self.expert_scale = replicated_parameter(
                torch.ones(config.num_moe_experts, dtype=config.params_dtype), config
            )

        def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
            """Return the MLP's normalized output."""
            out = super().shared_experts_compute(self.dense_layernorm(hidden_states))
            normal: Tensor = self.dense_post_layernorm(out)
            return normal

        def route(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Return weights and mask of the chosen experts."""
            size = hidden_states.shape[-1:]
            normal = rms_norm(hidden_states.float(), size, None, self.epsilon).to(hidden_states.dtype)
            scaled = normal * self.router_scale * size[0] ** -0.5
            weights, chosen = super().route(scaled, *args, **kwargs)
            return weights * self.expert_scale.to(weights.dtype), chosen

        def preprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Return the normalized input of the experts."""
            sent: tuple[Tensor, Tensor] = super().preprocess(
                self.experts_layernorm(hidden_states), *args, **kwargs
            )
            return sent

        def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
            """Return the experts' normalized output plus the MLP's."""
            routed: Tensor = self.experts_post_layernorm(super().postprocess(output, None))
            return routed + shared_expert_output

    return MoEWithDenseMlp


def _norms(config: MegatronConfig) -> tuple[PostNorm, PostNorm]:
    size, epsilon = config.hidden_size, config.layernorm_epsilon
    return PostNorm(config, size, epsilon), PostNorm(config, size, epsilon)


def _spec(context: Context) -> SpecChanges:
    return SpecChanges({"pre_mlp_layernorm": remove_module}, change_moe_layer(with_dense_mlp).classes)


def _problems(setup: Setup) -> Iterator[str]:
    yield from shared_expert_overlap_problems(setup)
    if setup.settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex sends tokens to the experts of their largest weights, and this model's "
            "may be negative; use alltoall or allgather"
        )


MOE_WITH_DENSE_MLP = Feature(
    name="experts parallel to an MLP",
    enabled=lambda config: config.moe is not None and config.moe.moe_parallel_dense_mlp,
    problems=_problems,
    spec=_spec,
)
