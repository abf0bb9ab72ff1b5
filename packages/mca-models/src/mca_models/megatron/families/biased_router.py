"""Softmax routing with a bias that only chooses experts (ERNIE 4.5, LongCat Flash); Megatron has it with sigmoids only.

The softmax is over the chosen experts, or over all.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import MegatronModule


def has_biased_softmax(config: McaModelConfig) -> bool:
    """Whether experts are chosen by a bias on chances that are weighed by a softmax."""
    return config.moe_router_enable_expert_bias and config.moe_router_score_function == "softmax"


@dataclass
class BiasedTopK:
    """Chooses experts in the place of Megatron's ``RouterReplay``, as `group_router.GroupLimitedTopK` does.

    Args:
        router: Whose bias counts.
        layer_number: Set by Megatron.
    """

    router: MegatronModule
    layer_number: int | None = None

    def get_replay_topk(self, logits: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Of ``logits`` ``[tokens, experts]`` those whose chance and bias are highest together, and whose they are.

        With the softmax over all experts Megatron gives the chances themselves.
        """
        chances = logits.detach()
        if not self.router.config.moe_router_pre_softmax:
            chances = chances.softmax(-1, dtype=torch.float32)
        chosen = (chances + self.router.expert_bias).topk(topk, dim=1).indices
        return logits.gather(1, chosen), chosen


@cache
def biased_router(router: type) -> type:
    """A router class whose bias helps to choose experts."""

    class BiasedRouter(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = BiasedTopK(self)

    return BiasedRouter
