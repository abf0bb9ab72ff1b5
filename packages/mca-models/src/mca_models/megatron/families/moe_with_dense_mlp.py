"""Experts beside a dense MLP (Gemma 4), each after norms of its own and with a norm behind it.

Megatron's expert layer computes both, the MLP as a shared expert. The layer's own norm before them is taken out: the
router too looks at what was not normalised yet.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_models.megatron.families.norms import PostNorm
from mca_models.megatron.types import MarkedParameter, MegatronConfig


@cache
def with_dense_mlp(expert_layer: type) -> type:
    """Megatron's expert layer with such norms, and a router with weights on its input and on the chosen experts."""

    class MoEWithDenseMlp(expert_layer):  # type: ignore[misc]
        """What a layer adds up of its MLP and its experts."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            size, epsilon = config.hidden_size, config.layernorm_epsilon
            self.dense_layernorm, self.dense_post_layernorm = _norms(config)
            self.experts_layernorm, self.experts_post_layernorm = _norms(config)
            self.epsilon = epsilon
            self.router_scale = _marked(torch.ones(size, dtype=config.params_dtype), config)
            self.expert_scale = _marked(torch.ones(config.num_moe_experts, dtype=config.params_dtype), config)

        def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
            """The MLP's output, normalised."""
            out = super().shared_experts_compute(self.dense_layernorm(hidden_states))
            normal: Tensor = self.dense_post_layernorm(out)
            return normal

        def route(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Each token's weight on each expert, and which are chosen."""
            size = hidden_states.shape[-1:]
            normal = rms_norm(hidden_states.float(), size, None, self.epsilon).to(hidden_states.dtype)
            seen = normal * self.router_scale * size[0] ** -0.5
            weights, chosen = super().route(seen, *args, **kwargs)
            return weights * self.expert_scale.to(weights.dtype), chosen

        def preprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """What is sent to experts, normalised."""
            found: tuple[Tensor, Tensor] = super().preprocess(
                self.experts_layernorm(hidden_states), *args, **kwargs
            )
            return found

        def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
            """What experts give, normalised, and what the MLP gave."""
            routed: Tensor = self.experts_post_layernorm(super().postprocess(output, None))
            return routed + shared_expert_output

    return MoEWithDenseMlp


def _norms(config: MegatronConfig) -> tuple[PostNorm, PostNorm]:
    size, epsilon = config.hidden_size, config.layernorm_epsilon
    return PostNorm(config, size, epsilon), PostNorm(config, size, epsilon)


def _marked(values: Tensor, config: MegatronConfig) -> torch.nn.Parameter:
    """A parameter that all tensor ranks hold, each of which may see tokens of its own."""
    parameter: MarkedParameter = torch.nn.Parameter(values)
    parameter.sequence_parallel = config.sequence_parallel
    marked: torch.nn.Parameter = parameter
    return marked
