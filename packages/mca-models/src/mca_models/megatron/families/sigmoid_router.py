"""Experts weighed by their sigmoids as they are, and averaged with the shared one (Command A, North Mini)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from mca_config.model_config import McaModelConfig


def custom_sigmoid_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class weigh by sigmoids; None where Megatron's does, as with one expert for a token."""
    plain = not config.moe_router_normalised and config.moe_router_topk > 1
    return unnormalized_sigmoid_router if plain else None


@dataclass
class SigmoidTopK:
    """Chooses experts in the place of Megatron's ``RouterReplay``, as `group_router.GroupLimitedTopK` does.

    Args:
        layer_number: Set by Megatron.
    """

    layer_number: int | None = None
    total: Tensor | None = None

    def get_replay_topk(self, scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """The highest ``scores`` ``[tokens, experts]``, and whose they are; keeps each token's sum of them."""
        highest, chosen = scores.topk(topk, dim=1)
        self.total = highest.sum(-1, keepdim=True)
        return highest, chosen


@cache
def unnormalized_sigmoid_router(router: type) -> type:
    """A router class that multiplies weights by the sum that Megatron divides them by."""

    class UnnormalizedSigmoidRouter(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = SigmoidTopK()

        def routing(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Each token's weight on each expert, and which are chosen."""
            weights, chosen = super().routing(*args, **kwargs)
            choice = self.router_replay
            total, choice.total = choice.total, None
            if total is None:
                raise RuntimeError("experts were weighed without being chosen")
            return (weights * total).to(weights.dtype), chosen

    return UnnormalizedSigmoidRouter


@cache
def with_shared_expert_mean(expert_layer: type) -> type:
    """Megatron's expert layer that gives the mean of the shared expert and the others."""

    class SharedExpertMean(expert_layer):  # type: ignore[misc]
        """A layer of experts."""

        def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            """What all experts give."""
            given: Tensor = super().postprocess(output, shared_expert_output)
            return given * 0.5

    return SharedExpertMean
