"""Warnings about MoE router settings that train another model than ``config.json`` describes."""

import logging
from typing import TYPE_CHECKING

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.biased_router import has_biased_softmax

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

logger = logging.getLogger(__name__)

_FORCED = ("moe_router_force_load_balancing", "moe_router_force_biased")


def warn_router_bias_step(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig", *, trained: bool = True
) -> None:
    """Warn if Megatron's default step for expert biases is large compared to softmax router scores.

    Args:
        args: Training arguments.
        config: The model.
        megatron: Megatron's configuration of it.
        trained: Routers are trained, so their biases change.
    """
    rate = megatron.moe_router_bias_update_rate
    if trained and args.moe_router_bias_update_rate is None and rate and has_biased_softmax(config):
        logger.warning(
            "moe_router_bias_update_rate is %g (Megatron's default), and the mean probability of one of %d "
            "experts is %.2g; set moe_router_bias_update_rate; 0 keeps the checkpoint's biases as transformers does",
            rate,
            given(config.moe).num_router_choices,
            1 / given(config.moe).num_router_choices,
        )


def warn_forced_routing(config: McaModelConfig, megatron: "TransformerConfig") -> None:
    """Warn that a benchmark setting of Megatron's replaces the router's choice.

    Args:
        config: The model.
        megatron: Megatron's configuration of it.
    """
    names = [name for name in _FORCED if getattr(megatron, name, None)]
    if names and config.moe is not None:
        logger.warning(
            "%s: experts are chosen at random, in evaluation and log-probabilities too, so losses are not the "
            "model's; use it only to measure speed",
            ", ".join(names),
        )
