"""Positions of images and audio clips among tokens. No pixel is touched, and no model."""

from mca_models.media.positions import (
    MEDIA,
    ImageSpan,
    attention_ends,
    feature_rows,
    feature_rows_of_batch,
    placeholders,
    positions,
)
from mca_models.media.tile_order import tile_order

__all__ = [
    "MEDIA",
    "ImageSpan",
    "attention_ends",
    "feature_rows",
    "feature_rows_of_batch",
    "placeholders",
    "positions",
    "tile_order",
]
