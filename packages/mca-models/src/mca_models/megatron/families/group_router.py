"""Group-limited routing by each group's best expert (DeepSeek V2), or its two best (DeepSeek V3).

Megatron sums a group's ``topk // group_topk`` best experts, whatever their scores are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig


def custom_group_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class choose groups as the model does; None where Megatron's own does."""
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk or 1
    if not groups:
        return None
    if config.moe_router_group_score == "max":
        return partial(group_router, groups=groups, kept=kept, best=1)
    if config.moe_router_score_function == "sigmoid" and config.moe_router_topk // kept != 2:
        return partial(group_router, groups=groups, kept=kept, best=2)
    return None


@dataclass
class GroupLimitedTopK:
    """Chooses experts in the place of Megatron's ``RouterReplay``, the only way to tell a router how.

    So nothing else of the router changes: weights, auxiliary losses and the z-loss are of the scores for all experts.

    Args:
        groups: Groups of experts.
        kept: Groups that a token may be sent to.
        best: How many of a group's highest scores its score is the sum of.
        layer_number: Set by Megatron.
    """

    groups: int
    kept: int
    best: int
    layer_number: int | None = None

    def get_replay_topk(self, scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """The highest allowed ``scores`` ``[tokens, experts]``, 0 where too few are allowed, and whose they are."""
        forbidden = ~best_group_mask(scores.detach(), self.groups, self.kept, self.best)
        chosen = scores.detach().masked_fill(forbidden, -torch.inf).topk(topk, dim=1).indices
        return scores.masked_fill(forbidden, 0.0).gather(1, chosen), chosen


@cache
def group_router(router: type, groups: int, kept: int, best: int) -> type:
    """A router class that sends each token to ``kept`` of ``groups`` groups of experts only."""

    class GroupRouter(router):  # type: ignore[misc]
        """Megatron's router over the experts of the kept groups."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = GroupLimitedTopK(groups, kept, best)

    return GroupRouter


def best_group_mask(scores: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """Which experts ``[..., experts]`` lie in the ``kept`` groups whose ``best`` experts score highest together."""
    by_group = scores.unflatten(-1, (groups, -1))
    highest = by_group.topk(best, -1).values.sum(-1).topk(kept, -1).indices
    empty = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device)
    chosen = empty.scatter_(-1, highest, True)
    return chosen.unsqueeze(-1).expand_as(by_group).flatten(-2)
