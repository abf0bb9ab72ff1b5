"""SparseMixer (Phi 3.5 MoE): two experts of a token, each drawn among those whose logits are close to the highest.

In evaluation both are the highest ones. In training the draws come from the generator that tensor ranks share, or with
sequence parallelism, where each of them has tokens of its own, from the one that they do not share: as dropout's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import MegatronModule

_KEPT = 0.75
"""The share of draws of less likely experts whose weight is lowered to a third (Heun's third-order method)."""


def custom_sparse_mixer(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class draw as the model does; None where it has no SparseMixer."""
    jitter = config.sparse_mixer_jitter
    return None if jitter is None else partial(sparse_mixer_router, jitter=jitter)


@dataclass
class SparseMixerTopK:
    """Chooses experts in the place of Megatron's ``RouterReplay``, as `group_router.GroupLimitedTopK` does.

    Args:
        router: Which draws while it is trained.
        jitter: See `sparse_mixer_topk`.
        layer_number: Set by Megatron.
    """

    router: MegatronModule
    jitter: float
    layer_number: int | None = None
    logits: Tensor | None = None

    def get_replay_topk(self, chances: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Weights and experts of the logits that the router was given, whatever their ``chances`` are."""
        if self.logits is None:
            raise RuntimeError("experts were chosen without their router")
        weights, chosen = sparse_mixer_topk(self.logits, self.jitter, draws=self.router.training)
        self.logits = None
        return weights + 0.0 * chances.gather(1, chosen), chosen  # by which the z-loss gets its gradient


@cache
def sparse_mixer_router(router: type, jitter: float) -> type:
    """A router class that chooses by `sparse_mixer_topk`."""

    class SparseMixerRouter(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = SparseMixerTopK(self, jitter)

        def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Each token's weight on each expert, and which are chosen."""
            self.router_replay.logits = logits.flatten(0, -2)
            found: tuple[Tensor, Tensor] = super().routing(logits, *args, **kwargs)
            return found

    return SparseMixerRouter


def sparse_mixer_topk(logits: Tensor, jitter: float, *, draws: bool) -> tuple[Tensor, Tensor]:
    """The weights of two experts of each token, and which they are, both ``[tokens, 2]``.

    Args:
        logits: ``[tokens, experts]``.
        jitter: Experts are open whose logits lie within twice this share of the highest.
        draws: They are drawn among the open ones, with an estimate of the gradient; otherwise the highest is taken.
    """
    weight, first = _draw_expert(logits, logits, jitter, draws=draws)
    others = logits.scatter(-1, first, -torch.inf)
    lesser, second = _draw_expert(logits, others, jitter, draws=draws)
    return torch.cat([weight, lesser], -1), torch.cat([first, second], -1)


def _draw_expert(logits: Tensor, candidates: Tensor, jitter: float, *, draws: bool) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        highest, chosen = candidates.max(-1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > 2 * jitter
    gates = candidates.masked_fill(far, -torch.inf)
    chances = gates.softmax(-1)
    if not draws:
        return chances.gather(-1, chosen), chosen
    chosen = (gates - exponential(gates).log()).argmax(-1, keepdim=True)
    highest, likeliest = chances.max(-1, keepdim=True)
    kept = (chosen == likeliest) | (uniform(highest) > _KEPT)
    factor = torch.add(0.3333, kept, alpha=0.6667).type_as(chances)
    weight: Tensor = _Estimated.apply(logits, chances, chosen, factor)
    return weight, chosen


class _Estimated(torch.autograd.Function):
    """The chance of what was drawn, times ``factor``, with the gradient that it has without that factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chances: Tensor, chosen: Tensor, factor: Tensor) -> Tensor:
        chance = chances.gather(-1, chosen)
        ctx.save_for_backward(chances, chosen, chance)
        return chance * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        chances, chosen, chance = ctx.saved_tensors
        gradient = gradients[0] * chance
        return (-chances * gradient).scatter_add_(-1, chosen, gradient), None, None, None


def exponential(like: Tensor) -> Tensor:
    """Draws from the exponential distribution."""
    return torch.empty_like(like).exponential_()


def uniform(like: Tensor) -> Tensor:
    """Draws between 0 and 1."""
    return torch.rand_like(like)


def noise(like: Tensor, size: float) -> Tensor:
    """Draws within ``size`` of 1."""
    return torch.empty_like(like).uniform_(1.0 - size, 1.0 + size)


@cache
def with_noisy_input(expert_layer: type, size: float) -> type:
    """Megatron's expert layer whose experts and router get, in training, an input with noise on it, twice."""

    class NoisyInput(expert_layer):  # type: ignore[misc]
        """A layer of experts."""

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> MegatronModule:
            """See Megatron's layer."""
            if self.training:
                for _ in range(2):
                    hidden_states = hidden_states * noise(hidden_states, size)
            return super().forward(hidden_states, *args, **kwargs)

    return NoisyInput
