"""The vision tower of a vision-language model."""

from dataclasses import dataclass

from mca_config.model.section import Section
from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Vision(Section):
    """The vision tower and its connection to the decoder."""

    vision_fields: JsonObject
    """Fields of ``config.json`` about the vision tower, its parameter prefix and its tokens."""
    deepstack_layers: int = 0
    """Number of first decoder layers after which features of inner vision layers are added to image tokens."""
    bidirectional_images: bool = False
    """The tokens of an image attend to each other in both directions, where ``config.json`` says so (Gemma 4)."""
