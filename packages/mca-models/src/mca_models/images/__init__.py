"""Positions of images among tokens. No pixel is touched, and no model."""

from mca_models.images.positions import ImageSpan, attention_ends, feature_rows, placeholders, positions

__all__ = ["ImageSpan", "attention_ends", "feature_rows", "placeholders", "positions"]
