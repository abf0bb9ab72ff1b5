"""Where images stand among tokens. No pixel is touched, and no model."""

from mca_models.images.placeholders import placeholders
from mca_models.images.positions import ImagePlace, attention_ends, feature_rows, positions

__all__ = ["ImagePlace", "attention_ends", "feature_rows", "placeholders", "positions"]
