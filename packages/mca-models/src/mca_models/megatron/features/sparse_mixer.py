"""SparseMixer (Phi 3.5 MoE): two experts per token, each drawn among those whose logits are close to the highest.

In evaluation both are the highest ones. In training the draws come from the generator that tensor ranks share, or with
sequence parallelism, where each rank has other tokens, from the generator that they do not share, as for dropout.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mca_config.model.section import given
from mca_models.megatron.features.feature import Feature, change_moe_layer
from mca_models.megatron.features.router_replay import ReplayableTopK, router_with_choice
from mca_models.megatron.types import MegatronModule

_THIRD_ORDER_SHARE = 0.75
"""The share of draws of less likely experts whose weight is lowered to a third (Heun's third-order method)."""


@dataclass
class SparseMixerTopK(ReplayableTopK):
    """SparseMixer's choice of experts.

    Args:
        router: The router, which draws in training mode.
        jitter: See `sparse_mixer_topk`.
    """

    router: MegatronModule
    jitter: float
    logits: Tensor | None = None

    def choose(self, probabilities: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return weights and indices of experts from the router's logits, not from ``probabilities``."""
        weights, chosen = sparse_mixer_topk(self._own_logits(), self.jitter, draws=self.router.training)
        return weights + 0.0 * probabilities.gather(1, chosen), chosen  # keeps the gradient of the z-loss

    def weigh(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of given experts as in evaluation; in training they are not drawn, so not rescaled."""
        weights = sparse_mixer_weights(self._own_logits(), self.jitter, chosen)
        return weights + 0.0 * probabilities.gather(1, chosen)

    def _own_logits(self) -> Tensor:
        if self.logits is None:
            raise RuntimeError("experts were chosen without their router")
        return self.logits


@cache
def sparse_mixer_router(router: type, jitter: float) -> type:
    """Return a router class that chooses with `sparse_mixer_topk`."""

    class SparseMixerRouter(router_with_choice(router, lambda own: SparseMixerTopK(own, jitter))):  # type: ignore[misc]
        """Megatron's router."""

        def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Return weights and mask of the chosen experts."""
            self.router_replay.logits = logits.flatten(0, -2)
            routed: tuple[Tensor, Tensor] = super().routing(logits, *args, **kwargs)
            self.router_replay.logits = None
            return routed

    return SparseMixerRouter


def sparse_mixer_topk(logits: Tensor, jitter: float, *, draws: bool) -> tuple[Tensor, Tensor]:
    """Return weights and indices of two experts per token, both ``[tokens, 2]``.

    Args:
        logits: ``[tokens, experts]``.
        jitter: Experts whose logits are within twice this share of the highest are candidates.
        draws: Draw among the candidates, with an estimate of the gradient; otherwise take the highest.
    """
    weight, first = _draw_expert(logits, logits, jitter, draws=draws)
    rest = logits.scatter(-1, first, -torch.inf)
    lesser, second = _draw_expert(logits, rest, jitter, draws=draws)
    return torch.cat([weight, lesser], -1), torch.cat([first, second], -1)


def sparse_mixer_weights(logits: Tensor, jitter: float, chosen: Tensor) -> Tensor:
    """Return the weights ``[tokens, 2]`` of ``chosen`` experts, in that order, without a draw; 0 for no candidate."""
    first, second = chosen.split(1, -1)
    rest = logits.scatter(-1, first, -torch.inf)
    gates = (_candidate_gates(logits, logits, jitter)[0], _candidate_gates(logits, rest, jitter)[0])
    return torch.cat(
        [gate.softmax(-1).gather(-1, each) for gate, each in zip(gates, (first, second), strict=True)], -1
    )


def _candidate_gates(logits: Tensor, candidates: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return ``candidates`` without those far from the highest, and the index of the highest."""
    with torch.no_grad():
        highest, chosen = candidates.max(-1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > 2 * jitter
    return candidates.masked_fill(far, -torch.inf), chosen


def _draw_expert(logits: Tensor, candidates: Tensor, jitter: float, *, draws: bool) -> tuple[Tensor, Tensor]:
    gates, chosen = _candidate_gates(logits, candidates, jitter)
    probabilities = gates.softmax(-1)
    if not draws:
        return probabilities.gather(-1, chosen), chosen
    chosen = (gates - exponential(gates).log()).argmax(-1, keepdim=True)
    highest, likeliest = probabilities.max(-1, keepdim=True)
    kept = (chosen == likeliest) | (uniform(highest) > _THIRD_ORDER_SHARE)
    factor = torch.add(0.3333, kept, alpha=0.6667).type_as(probabilities)
    weight: Tensor = _GradientEstimate.apply(logits, probabilities, chosen, factor)
    return weight, chosen


class _GradientEstimate(torch.autograd.Function):
    """Probability of the drawn expert times ``factor``, with its gradient without that factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor, chosen: Tensor, factor: Tensor) -> Tensor:
        probability = probabilities.gather(-1, chosen)
        ctx.save_for_backward(probabilities, chosen, probability)
        return probability * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, chosen, probability = ctx.saved_tensors
        gradient = gradients[0] * probability
        return (-probabilities * gradient).scatter_add_(-1, chosen, gradient), None, None, None


def exponential(like: Tensor) -> Tensor:
    """Draw from the exponential distribution."""
    return torch.empty_like(like).exponential_()


def uniform(like: Tensor) -> Tensor:
    """Draw between 0 and 1."""
    return torch.rand_like(like)


def noise(like: Tensor, size: float) -> Tensor:
    """Draw within ``size`` of 1."""
    return torch.empty_like(like).uniform_(1.0 - size, 1.0 + size)


@cache
def with_noisy_input(expert_layer: type, size: float) -> type:
    """Return an MoE layer class that multiplies its input by noise, twice, in training."""

    class NoisyInput(expert_layer):  # type: ignore[misc]
        """MoE layer with noise on its input."""

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> MegatronModule:
            """Add noise in training, then call Megatron's layer."""
            if self.training:
                for _ in range(2):
                    hidden_states = hidden_states * noise(hidden_states, size)
            return super().forward(hidden_states, *args, **kwargs)

    return NoisyInput


SPARSE_MIXER = Feature(
    name="SparseMixer",
    enabled=lambda config: config.moe is not None and config.moe.sparse_mixer_jitter is not None,
    router=lambda router, config: sparse_mixer_router(router, given(config.moe).sparse_mixer_jitter or 0.0),
)
NOISY_EXPERTS = Feature(
    name="noise on the input of experts",
    enabled=lambda config: config.moe is not None and config.moe.input_jitter_noise > 0,
    spec=lambda context: change_moe_layer(
        lambda experts: with_noisy_input(experts, given(context.config.moe).input_jitter_noise)
    ),
)
