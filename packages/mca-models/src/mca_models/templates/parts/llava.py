"""Towers of the LLaVA models: CLIP or SigLIP before its last layers, and a projector of two linears.

LLaVA-NeXT and LLaVA-OneVision cut an image into tiles, next to which they see it as a whole. Without the padding, the
tiles' features are joined into one picture, each row of which ends with a learned feature.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, clip_tower, siglip_tower
from mca_models.templates.parts.vision_tower import PROJECTOR, TOWER, Shapes, linear
from mca_models.templates.parts.vision_values import VisionValues, vision_values

NEWLINE = "image_newline"
"""Feature at the end of each row of features."""
TILED_SPELLINGS = tuple(
    replace(each, vision={**each.vision, NEWLINE: each.vision[PROJECTOR].replace(PROJECTOR, NEWLINE)})
    for each in CLIP_SPELLINGS
)
"""Names of files with that feature."""
_SHARED = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
LLAMA_DEFAULTS = {**_SHARED, "intermediate_size": 11008, "max_position_embeddings": 2048}
MISTRAL_DEFAULTS = {**_SHARED, "intermediate_size": 14336, "max_position_embeddings": 131072}
"""Keys of text models that published files leave out."""


def is_clip(vision: VisionValues, *, clip: bool = True) -> bool:
    """Return whether a tower is CLIP's; the other is SigLIP's. ``clip`` is the default, here and below."""
    known = ("clip_vision_model", "siglip_vision_model")
    return vision.choice("model_type", *(known if clip else reversed(known))) == known[0]


def llava_tensors(config: McaModelConfig, *, clip: bool = True) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    tower = clip_tower(vision) if is_clip(vision, clip=clip) else siglip_tower(vision)
    biased = about.flag("multimodal_projector_bias", True)
    taken = vision.size("hidden_size", 768) * len(about.index_or_more("vision_feature_layer", -2))
    return {
        **{TOWER + name: shape for name, shape in tower.items()},
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size, bias=biased),
    }


def tiled_tensors(config: McaModelConfig, *, clip: bool = True) -> Shapes:
    """Return every tensor of tower and projector, and the feature at the end of rows."""
    return {**llava_tensors(config, clip=clip), NEWLINE: (config.hidden_size,)}


def patches_per_side(config: McaModelConfig, *, clip: bool = True) -> int:
    """Return the patches along a side of a tile."""
    _, vision = vision_values(config)
    return vision.size("image_size", 224) // vision.size(
        "patch_size", 32 if is_clip(vision, clip=clip) else 16
    )


def tokens_per_tile(config: McaModelConfig, *, clip: bool = True) -> int:
    """Return the features of a tile."""
    return patches_per_side(config, clip=clip) ** 2


def tokens_together(config: McaModelConfig) -> int:
    """Return the features of an image of LLaVA-OneVision next to others: those of one tile, and the one at its end."""
    return tokens_per_tile(config, clip=False) + 1


def tokens_per_frame(config: McaModelConfig) -> int:
    """Return the features of a frame, whose patches are pooled by two and two."""
    return int((patches_per_side(config, clip=False) + 1) // 2) ** 2


def best_resolution(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size in which most of an image of ``height`` times ``width`` remains with the least padding."""

    def fit(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=fit)


def tiled_tokens(config: McaModelConfig, height: int, width: int, *, clip: bool = True) -> int:
    """Return the features of an image of ``height`` times ``width`` pixels.

    Raises:
        McaError: The image is so narrow that nothing but padding would remain.
    """
    about, vision = vision_values(config)
    side, tile = patches_per_side(config, clip=clip), vision.size("image_size", 224)
    sizes = about.pairs("image_grid_pinpoints", _GRIDS)
    rows, columns = (pixels // tile * side for pixels in best_resolution(height, width, sizes))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if most := _most_tiles(about):
        ratio = sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    if not rows * columns:
        raise McaError(
            f"an image of {width} x {height} pixels cannot be used: it is too narrow"
            "; remove the row or crop the image"
        )
    return side**2 + rows * columns + rows


def count_tiles(config: McaModelConfig, height: int, width: int) -> int:
    """Return the tiles of an image of ``height`` times ``width`` pixels, with the one of the whole image."""
    about, vision = vision_values(config)
    rows, columns = best_resolution(height, width, about.pairs("image_grid_pinpoints", _GRIDS))
    tile = vision.size("image_size", 224)
    return int(1 + rows // tile * (columns // tile))


def _most_tiles(about: VisionValues) -> int:
    """Return the number of tiles whose features a larger picture is shrunk to, 0 if there is none."""
    kind = str(about.values.get("vision_aspect_ratio", ""))
    most = kind.removeprefix("anyres_max_")
    if kind and (most == kind or not most.isdecimal()):
        raise McaError(
            f"'vision_aspect_ratio' of config.json is {kind!r}; expected 'anyres_max_9' or the like"
        )
    return int(most or 0)


_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION_GRIDS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""Sizes of tiled images that files of LLaVA-OneVision leave out."""
