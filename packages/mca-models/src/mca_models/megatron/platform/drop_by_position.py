"""Keep the first tokens of experts with a limited capacity for ``moe_token_drop_policy: position``.

``apply_router_token_dropping`` takes the topk of a mask of ones and zeros, whose ones are all equal: which tokens are
kept is up to torch's ``topk``, and on a CPU it is mostly the last ones.
"""

import functools
import inspect

import torch
from torch import Tensor

from mca_models.megatron.platform._patch import EVERYWHERE, Patch

_NAME = "apply_router_token_dropping"


def _needed() -> bool:
    from megatron.core.transformer.moe import moe_utils

    plain = getattr(moe_utils, _NAME)
    return "routing_map.int()" in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply() -> None:
    from megatron.core.transformer.moe import moe_utils, router

    plain = getattr(moe_utils, _NAME)

    @functools.wraps(plain)
    def dropping(
        routing_probs: Tensor,
        routing_map: Tensor,
        router_topk: int,
        capacity_factor: float,
        drop_policy: str = "probs",
        pad_to_capacity: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ranked = routing_probs
        if drop_policy == "position":  # the first token ranks highest
            priorities = torch.arange(len(routing_map), 0, -1, dtype=torch.int32, device=routing_map.device)
            ranked, drop_policy = routing_map * priorities.unsqueeze(-1), "probs"
        _, kept = plain(ranked, routing_map, router_topk, capacity_factor, drop_policy, pad_to_capacity)
        return routing_probs * kept, kept

    for module in (moe_utils, router):
        setattr(module, _NAME, dropping)


PATCH = Patch(
    name="drop-by-position",
    why="moe_token_drop_policy position keeps any tokens of an expert instead of the first ones",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
