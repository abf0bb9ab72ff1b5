"""Group-limited routing by each group's best expert (DeepSeek V2), or its two best (DeepSeek V3).

Megatron sums a group's ``topk // group_topk`` best experts for all score functions.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.router_replay import ReplayableTopK
from mca_models.megatron.types import MegatronModule


def has_custom_groups(config: McaModelConfig) -> bool:
    """Return whether Megatron's router chooses other groups than the model."""
    moe = config.moe
    if moe is None or not moe.moe_router_num_groups:
        return False
    two_best = moe.moe_router_score_function == "sigmoid"
    return moe.moe_router_group_score == "max" or (
        two_best and moe.moe_router_topk // (moe.moe_router_group_topk or 1) != 2
    )


def _adapted(router: type, config: McaModelConfig) -> type:
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

    class GroupRouter(router):  # type: ignore[misc]
        """Megatron's router over the experts of the best groups."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = GroupLimitedTopK(groups, group_topk, best)

    return GroupRouter


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
    router=_adapted,
    settings=lambda config: {"moe_router_num_groups": None, "moe_router_group_topk": None},
)
