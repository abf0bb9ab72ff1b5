"""Which routers choose experts otherwise than Megatron's."""

from collections.abc import Callable

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.biased_router import biased_router, has_biased_softmax
from mca_models.megatron.families.group_router import own_groups
from mca_models.megatron.families.shortcut_moe import router_of_more
from mca_models.megatron.families.sigmoid_router import own_weights
from mca_models.megatron.families.sparse_mixer import own_mixer


def own_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class choose as the model does; None where Megatron's own does."""
    chooses = biased_router if has_biased_softmax(config) else own_groups(config) or own_mixer(config)
    chooses = chooses or own_weights(config)
    more = config.moe_identity_experts
    if not more:
        return chooses
    return lambda router: router_of_more(chooses(router) if chooses else router, more)
