"""Model features beyond Megatron's layers, selected by fields of ``McaModelConfig``, never by the family's name."""

from mca_models.megatron.features.chunk import finish, positions, rotary
from mca_models.megatron.features.latent_moe import latent_projections
from mca_models.megatron.features.scales import scaled_activation
from mca_models.megatron.features.settings import before_building, settings
from mca_models.megatron.features.spec import adapted_block, adapted_prediction

__all__ = [
    "adapted_block",
    "adapted_prediction",
    "before_building",
    "finish",
    "latent_projections",
    "positions",
    "rotary",
    "scaled_activation",
    "settings",
]
