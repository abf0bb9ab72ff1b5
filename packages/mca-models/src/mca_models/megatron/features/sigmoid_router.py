"""Sigmoid router without normalized weights, and the mean of shared and routed experts (Command A, North Mini)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.router_replay import ReplayableTopK
from mca_models.megatron.types import MegatronModule


def custom_sigmoid_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """Return a function that adapts a router class to unnormalized sigmoids; None if Megatron's router fits."""
    if config.moe is None:
        return None
    plain = not config.moe.moe_router_normalised and config.moe.moe_router_topk > 1
    return unnormalized_sigmoid_router if plain else None


@dataclass
class SigmoidTopK(ReplayableTopK):
    """Top-k choice that keeps the sum of scores."""

    total: Tensor | None = None

    def get_replay_topk(self, scores: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return the scores ``[tokens, topk]`` of the experts and their indices; save each token's sum."""
        values, chosen = super().get_replay_topk(scores, topk, *options)
        self.total = values.sum(-1, keepdim=True)
        return values, chosen

    def choose(self, scores: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return the highest ``scores`` ``[tokens, topk]`` and their indices."""
        highest, chosen = scores.topk(topk, dim=1)
        return highest, chosen


@cache
def unnormalized_sigmoid_router(router: type) -> type:
    """Return a router class that multiplies weights by the sum that Megatron divides them by."""

    class UnnormalizedSigmoidRouter(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = SigmoidTopK()

        def routing(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            """Return weights and mask of the chosen experts."""
            weights, chosen = super().routing(*args, **kwargs)
            choice = self.router_replay
            total, choice.total = choice.total, None
            if total is None:
                raise RuntimeError("experts were weighed without being chosen")
            return (weights * total).to(weights.dtype), chosen

    return UnnormalizedSigmoidRouter


@cache
def with_shared_expert_mean(expert_layer: type) -> type:
    """Return an MoE layer class that averages the shared expert and the routed experts."""

    class SharedExpertMean(expert_layer):  # type: ignore[misc]
        """MoE layer with averaged outputs."""

        def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            """Return the mean of both outputs."""
            total: Tensor = super().postprocess(output, shared_expert_output)
            return total * 0.5

    return SharedExpertMean
