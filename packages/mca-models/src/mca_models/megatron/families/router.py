"""Which routers choose experts otherwise than Megatron's."""

from collections.abc import Callable

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.biased_router import biased_router, has_biased_softmax
from mca_models.megatron.families.group_router import custom_group_router
from mca_models.megatron.families.shortcut_moe import router_with_identity_experts
from mca_models.megatron.families.sigmoid_router import custom_sigmoid_router
from mca_models.megatron.families.sparse_mixer import custom_sparse_mixer


def custom_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """What makes a router class choose as the model does; None where Megatron's own does."""
    chooses = (
        biased_router
        if has_biased_softmax(config)
        else custom_group_router(config) or custom_sparse_mixer(config)
    )
    chooses = chooses or custom_sigmoid_router(config)
    more = config.moe_identity_experts
    if not more:
        return chooses
    return lambda router: router_with_identity_experts(chooses(router) if chooses else router, more)
