"""Choice of routers that differ from Megatron's."""

from collections.abc import Callable

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.biased_router import biased_router, has_biased_softmax
from mca_models.megatron.features.group_router import custom_group_router
from mca_models.megatron.features.identity_experts import router_with_identity_experts
from mca_models.megatron.features.sigmoid_router import custom_sigmoid_router
from mca_models.megatron.features.sparse_mixer import custom_sparse_mixer


def custom_router(config: McaModelConfig) -> Callable[[type], type] | None:
    """Return a function that adapts a router class to the model; None if Megatron's router fits."""
    if config.moe is None:
        return None
    adapt = (
        biased_router
        if has_biased_softmax(config)
        else custom_group_router(config) or custom_sparse_mixer(config)
    )
    adapt = adapt or custom_sigmoid_router(config)
    count = config.moe.moe_identity_experts
    if not count:
        return adapt
    return lambda router: router_with_identity_experts(adapt(router) if adapt else router, count)
