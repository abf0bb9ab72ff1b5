"""Where images stand among tokens. No pixel is touched, and no model."""

from mca_models.images.positions import ImagePlace, feature_rows, positions

__all__ = ["ImagePlace", "feature_rows", "positions"]
