"""Model features beyond Megatron's layers, selected by fields of ``McaModelConfig``, never by the family's name."""

from mca_models.megatron.features.features import (
    adapted_block,
    adapted_prediction,
    building,
    finish,
    positions,
    settings,
)

__all__ = ["adapted_block", "adapted_prediction", "building", "finish", "positions", "settings"]
