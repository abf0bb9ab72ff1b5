"""Tokens of Gemma 4's images, and which of them attend to each other."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.templates.lens import Lens

BIDIRECTIONAL = "use_bidirectional_attention"
GEMMA4_TOKENS: Values = {
    **{"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881},
    **{"boi_token_id": 255_999, "eoi_token_id": 258_882, "boa_token_id": 256_000, "eoa_token_index": 258_883},
}
"""Default ids of placeholders, and of the marks around an image and a clip."""
CLIP_MARKS = ("boa_token_id", "eoa_token_index")
"""Keys of the marks around a clip."""
MOST_TOKENS = 1120
"""Most tokens of an image that Gemma 4's processors allow."""


def image_reach(config: McaModelConfig) -> int:
    """Return how many later tokens an image token attends to at most."""
    return MOST_TOKENS - 1 if given(config.vision).bidirectional_images else 0


def bidirectional_images(default: str | None) -> Lens:
    """Return the lens on bidirectional attention inside images; ``default`` is the value of an absent key."""
    return Lens(
        lambda hf: {"bidirectional_images": hf.get(BIDIRECTIONAL, default) == "vision"},
        lambda values: {BIDIRECTIONAL: "vision" if values["bidirectional_images"] else None},
    )
