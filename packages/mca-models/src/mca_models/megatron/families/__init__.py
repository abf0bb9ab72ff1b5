"""Model features beyond Megatron's layers, selected by fields of ``McaModelConfig``, never by the family's name."""

from mca_models.megatron.families.chunk import finish, positions, rotary
from mca_models.megatron.families.latent_moe import latent_projections
from mca_models.megatron.families.scales import scaled_activation
from mca_models.megatron.families.settings import before_building, settings
from mca_models.megatron.families.spec import adapted_block, adapted_prediction

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
