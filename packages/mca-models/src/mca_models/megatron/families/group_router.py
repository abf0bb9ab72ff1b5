"""Group-limited routing by each group's best expert (DeepSeek V2); Megatron sums a group's best experts."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


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
            allowed = experts_of_best_groups(scores, groups, kept)
            share = (scores * allowed).sum(-1).view(-1, 1)
            lowest = torch.finfo(logits.dtype).min
            probs, routing_map = super().routing(logits.masked_fill(~allowed, lowest), *args, **kwargs)
            return probs * share.to(probs.dtype), routing_map

    return BestGroupRouter


def experts_of_best_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """Which experts ``[..., experts]`` lie in the ``kept`` groups whose best expert scores highest."""
    by_group = scores.unflatten(-1, (groups, -1))
    best = by_group.amax(-1).topk(kept, -1).indices
    chosen = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    return chosen.unsqueeze(-1).expand_as(by_group).flatten(-2)
