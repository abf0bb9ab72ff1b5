"""Routers that Megatron lacks.

- Group-limited routing by each group's best expert (DeepSeek V2), or its two best (DeepSeek V3). Megatron sums a
  group's ``topk // group_topk`` best experts for all score functions.
- Softmax routing with an expert bias (ERNIE 4.5, LongCat Flash), over the chosen experts or over all. Megatron supports
  the bias for sigmoid scores only.
- Sigmoid scores without normalized weights, and the mean of shared and routed experts (Command A, North Mini).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Context, Feature, change_moe_layer
from mca_models.megatron.features.router_replay import ReplayableTopK, router_with_choice
from mca_models.megatron.types import MegatronConfig, MegatronModule


def has_custom_groups(config: McaModelConfig) -> bool:
    """Return whether Megatron's router chooses other groups than the model."""
    moe = config.moe
    if moe is None or not moe.moe_router_num_groups:
        return False
    two_best = moe.moe_router_score_function == "sigmoid"
    return moe.moe_router_group_score == "max" or (
        two_best and moe.moe_router_topk // (moe.moe_router_group_topk or 1) != 2
    )


def _group_limited(router: type, config: McaModelConfig) -> type:
    moe = given(config.moe)
    best = 1 if moe.moe_router_group_score == "max" else 2
    return group_router(router, moe.moe_router_num_groups or 1, moe.moe_router_group_topk or 1, best)


@dataclass
class GroupLimitedTopK(ReplayableTopK):
    """Group-limited top-k choice.

    The rest of the router is unchanged: weights, auxiliary losses and the z-loss use the scores of all experts.

    Args:
        groups: Groups of experts.
        group_topk: Number of groups that a token may be sent to.
        best: Number of a group's highest scores that its score is the sum of.
    """

    groups: int
    group_topk: int
    best: int

    def choose(self, scores: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return the highest ``scores`` ``[tokens, topk]`` in the best groups and their indices; 0 fills up."""
        forbidden = ~best_group_mask(scores.detach(), self.groups, self.group_topk, self.best)
        chosen = scores.detach().masked_fill(forbidden, -torch.inf).topk(topk, dim=1).indices
        return scores.masked_fill(forbidden, 0.0).gather(1, chosen), chosen


@cache
def group_router(router: type, groups: int, group_topk: int, best: int) -> type:
    """Return a router class that sends each token to the best ``group_topk`` of ``groups`` groups only."""
    return router_with_choice(router, lambda _: GroupLimitedTopK(groups, group_topk, best))


def best_group_mask(scores: Tensor, groups: int, group_topk: int, best: int) -> Tensor:
    """Return the mask ``[..., experts]`` of the ``group_topk`` groups with the highest sum of ``best`` experts."""
    by_group = scores.unflatten(-1, (groups, -1))
    highest = by_group.topk(best, -1).values.sum(-1).topk(group_topk, -1).indices
    empty = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device)
    chosen = empty.scatter_(-1, highest, True)
    return chosen.unsqueeze(-1).expand_as(by_group).flatten(-2)


GROUP_ROUTER = Feature(
    name="group-limited router",
    enabled=has_custom_groups,
    router=_group_limited,
    settings=lambda config: {"moe_router_num_groups": None, "moe_router_group_topk": None},
)


def has_biased_softmax(config: McaModelConfig) -> bool:
    """Return whether experts are chosen by softmax scores plus a bias."""
    moe = config.moe
    return (
        moe is not None and moe.moe_router_enable_expert_bias and moe.moe_router_score_function == "softmax"
    )


@dataclass
class BiasedTopK(ReplayableTopK):
    """Top-k choice by score plus bias.

    Args:
        router: The router with the bias.
    """

    router: MegatronModule

    def choose(self, logits: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return logits and indices ``[tokens, topk]`` of the experts with the highest score plus bias.

        With the softmax over all experts Megatron passes the scores instead of logits.
        """
        scores = logits.detach()
        if not self.router.config.moe_router_pre_softmax:
            scores = scores.softmax(-1, dtype=torch.float32)
        chosen = (scores + self.router.expert_bias).topk(topk, dim=1).indices
        return logits.gather(1, chosen), chosen


@cache
def biased_router(router: type) -> type:
    """Return a router class that adds its bias for the choice of experts."""
    return router_with_choice(router, BiasedTopK)


@contextmanager
def _with_bias(context: Context, megatron: MegatronConfig) -> Iterator[None]:
    """Let Megatron's router build its bias, and move it in training."""
    megatron.moe_router_enable_expert_bias = True
    yield


BIASED_ROUTER = Feature(
    name="softmax router with a bias",
    enabled=has_biased_softmax,
    router=lambda router, config: biased_router(router),
    settings=lambda config: {"moe_router_enable_expert_bias": False},  # Megatron's checks reject it
    prepare=_with_bias,
)


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

    class UnnormalizedSigmoidRouter(router_with_choice(router, lambda _: SigmoidTopK())):  # type: ignore[misc]
        """Megatron's router."""

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
