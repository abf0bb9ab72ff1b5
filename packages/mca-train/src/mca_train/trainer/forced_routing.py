"""Settings of Megatron's for measuring speed that put tokens where the router did not send them."""

import logging
from typing import TYPE_CHECKING

from mca_config.model_config import McaModelConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

logger = logging.getLogger(__name__)

_FORCED = ("moe_router_force_load_balancing", "moe_router_force_biased")


def tell_forced_routing(config: McaModelConfig, megatron: "TransformerConfig") -> None:
    """Logs that the model is not the one that it is without these settings.

    Args:
        config: The model.
        megatron: Megatron's configuration of it.
    """
    names = [name for name in _FORCED if getattr(megatron, name, None)]
    if names and config.num_moe_experts is not None:
        logger.warning(
            "%s: experts are chosen at random, in evaluation and log-probabilities too; losses are those of another "
            "model, so use it to measure speed alone",
            ", ".join(names),
        )
