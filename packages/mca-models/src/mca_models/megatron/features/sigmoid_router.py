"""Sigmoid router without normalized weights, and the mean of shared and routed experts (Command A, North Mini)."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature, change_moe_layer
from mca_models.megatron.features.router_replay import ReplayableTopK
from mca_models.megatron.types import MegatronModule


def _has_plain_sigmoids(config: McaModelConfig) -> bool:
    moe = config.moe
    return moe is not None and not moe.moe_router_normalised and moe.moe_router_topk > 1


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


SIGMOID_ROUTER = Feature(
    name="sigmoid router without normalised weights",
    enabled=_has_plain_sigmoids,
    router=lambda router, config: unnormalized_sigmoid_router(router),
)
SHARED_EXPERT_MEAN = Feature(
    name="mean of shared and routed experts",
    enabled=lambda config: config.moe is not None and config.moe.moe_shared_expert_mean,
    spec=lambda context: change_moe_layer(with_shared_expert_mean),
)
