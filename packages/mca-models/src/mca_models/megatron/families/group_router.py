"""Group-limited routing by each group's best expert (DeepSeek V2), or its two best (DeepSeek V3).

Megatron sums a group's ``topk // group_topk`` best experts, whatever their scores are.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig


def own_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class choose groups as the model does; None where Megatron's own does."""
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk or 1
    if not groups:
        return None
    if config.moe_router_group_score == "max":
        return partial(best_group_router, groups=groups, kept=kept)
    if config.moe_router_score_function == "sigmoid" and config.moe_router_topk // kept != 2:
        return partial(two_best_router, groups=groups, kept=kept)
    return None


@cache
def best_group_router(router: type, groups: int, kept: int) -> type:
    """A router class that first keeps ``kept`` of ``groups`` groups of experts for each token.

    The weights stay a softmax over all experts: Megatron's own over those kept is scaled by their share.
    """

    class BestGroupRouter(router):  # type: ignore[misc]
        """Megatron's router over the experts of the kept groups."""

        def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """See Megatron's ``TopKRouter``."""
            scores = torch.softmax(logits.float(), -1)
            allowed = experts_of_best_groups(scores, groups, kept, best=1)
            share = (scores * allowed).sum(-1).view(-1, 1)
            lowest = torch.finfo(logits.dtype).min
            probs, routing_map = super().routing(logits.masked_fill(~allowed, lowest), *args, **kwargs)
            return probs * share.to(probs.dtype), routing_map

    return BestGroupRouter


@cache
def two_best_router(router: type, groups: int, kept: int) -> type:
    """A router class for sigmoid scores that first keeps ``kept`` of ``groups`` groups of experts for each token."""

    class TwoBestRouter(router):  # type: ignore[misc]
        """Megatron's router, which adds the bias that only chooses experts: here minus infinity for other groups'."""

        expert_bias: Any

        def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """See Megatron's ``TopKRouter``."""
            before = self.expert_bias
            with torch.no_grad():
                scores = torch.sigmoid(logits.float())
                bias = torch.zeros_like(scores) if before is None else before.float().expand_as(scores)
                allowed = experts_of_best_groups(scores + bias, groups, kept, best=2)
                self.expert_bias = bias.masked_fill(~allowed, -torch.inf).flatten(0, -2)
            try:
                return super().routing(logits, *args, **kwargs)  # type: ignore[no-any-return]
            finally:
                self.expert_bias = before

    return TwoBestRouter


def experts_of_best_groups(scores: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """Which experts ``[..., experts]`` lie in the ``kept`` groups whose ``best`` experts score highest together."""
    by_group = scores.unflatten(-1, (groups, -1))
    highest = by_group.topk(best, -1).values.sum(-1).topk(kept, -1).indices
    empty = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device)
    chosen = empty.scatter_(-1, highest, True)
    return chosen.unsqueeze(-1).expand_as(by_group).flatten(-2)
