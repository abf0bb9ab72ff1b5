"""What a run does to biases that help to choose experts, where nobody has said how far a step moves them."""

import logging
from typing import TYPE_CHECKING

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.biased_router import has_biased_softmax

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

logger = logging.getLogger(__name__)


def tell_moving_biases(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig", *, trained: bool = True
) -> None:
    """Logs how far Megatron's default moves biases beside chances, which are much smaller than scores by sigmoid.

    Args:
        args: Training arguments.
        config: The model.
        megatron: Megatron's configuration of it.
        trained: Routers are, and so their biases move.
    """
    rate = megatron.moe_router_bias_update_rate
    if trained and args.moe_router_bias_update_rate is None and rate and has_biased_softmax(config):
        logger.warning(
            "each step moves the biases that choose experts by %g (Megatron's default), and the chance of one of %d "
            "experts is %.2g in the mean; set moe_router_bias_update_rate, to 0 to keep the checkpoint's biases as "
            "transformers does",
            rate,
            config.num_router_choices,
            1 / config.num_router_choices,
        )
