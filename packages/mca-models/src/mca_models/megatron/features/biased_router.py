"""Softmax routing with an expert bias (ERNIE 4.5, LongCat Flash), which Megatron supports for sigmoid scores only.

The softmax is over the chosen experts, or over all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Context, Feature
from mca_models.megatron.features.router_replay import ReplayableTopK
from mca_models.megatron.types import MegatronConfig, MegatronModule


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

    class BiasedRouter(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = BiasedTopK(self)

    return BiasedRouter


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
