"""Latent MoE: experts on a projection of the hidden states. Megatron's needs Transformer Engine's linear.

For local layers ``ReplicatedLinear`` replaces that linear.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mca_config.model.section import given
from mca_models.megatron.features.feature import Context, Feature, Setup
from mca_models.megatron.layers.replicated import ReplicatedLinear
from mca_models.megatron.types import MegatronConfig, Upstream


@contextmanager
def latent_projections(context: Context, megatron: MegatronConfig) -> Iterator[None]:
    """Make Megatron build local MoE layers with latent projections, in this block."""
    from megatron.core.transformer.moe import moe_layer

    if context.implementation == "transformer_engine":
        yield
        return
    module: Upstream = sys.modules[moe_layer.__name__]
    names = {"HAVE_TE": True, "TELinear": ReplicatedLinear}
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)
        for name, value in before.items():
            setattr(module, name, value)


def _problems(setup: Setup) -> Iterator[str]:
    if setup.settings.get("moe_shared_expert_overlap"):
        yield "moe_shared_expert_overlap is not supported with moe_latent_size; remove moe_shared_expert_overlap"


LATENT_MOE = Feature(
    name="latent MoE",
    enabled=lambda config: config.moe is not None and config.moe.moe_latent_size is not None,
    settings=lambda config: {"moe_latent_size": given(config.moe).moe_latent_size},
    problems=_problems,
    prepare=latent_projections,
)
