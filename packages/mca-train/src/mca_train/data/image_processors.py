"""Image tokens of a model, by the kind that its family has, with the image processor of its checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.media import placeholders
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import ImageTokenKind
from mca_train.data import image_tiles, patch_grids
from mca_train.data.chat import with_image_text
from mca_train.data.medium_tokens import ImageTokens, MediaContext, load_processor, require_placeholder
from mca_train.data.message_parts import IMAGE
from mca_train.data.placeholders import VIDEO_TAG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KINDS: Mapping[ImageTokenKind, Callable[[MediaContext], ImageTokens]] = {
    "patches": patch_grids.PatchTokens,
    "padded_patches": patch_grids.PaddedPatchTokens,
    "tiles": image_tiles.TileTokens,
    "lines": patch_grids.LineTokens,
    "whole_lines": patch_grids.WholeLineTokens,
    "fixed": image_tiles.FixedTokens,
    "pooled": patch_grids.PooledTokens,
    "plain": image_tiles.PlainTokens,
    "enclosed": image_tiles.EnclosedTokens,
    "tile_rows": image_tiles.TileRowTokens,
    "tile_breaks": image_tiles.BreakTileTokens,
    "named_tiles": image_tiles.NamedTileTokens,
    "joined_tiles": image_tiles.joined_tiles,
    "row_column_tiles": image_tiles.RowColumnTokens,
    "thumbnail_tiles": image_tiles.ThumbnailTokens,
    "numbered_slices": image_tiles.SliceTokens,
    "word_marks": image_tiles.WordMarkTokens,
    "word_tiles": image_tiles.TileTokens,
}


def image_tokens(
    config: McaModelConfig, directories: Sequence[Path], tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    """Return the image tokens of a model, whose image processor is in one of ``directories``.

    Raises:
        UsageError: The model does not support images, or there is no processor.
    """
    if config.vision_fields is None:
        raise UsageError(f"a {config.model_type} model does not support images; remove them from the rows")
    if (kind := _kind(config)) is None:
        raise UsageError(
            f"images of {config.model_type} are not supported in rows: mca does not write the tokens that its "
            "processor puts around an image; remove the images from the rows of the dataset"
        )
    processor = load_processor(directories, IMAGE)
    token = require_placeholder(IMAGE, config, config.vision_fields)
    return _KINDS[kind](MediaContext(processor, token, config, tokenizer))


def _kind(config: McaModelConfig) -> ImageTokenKind | None:
    """Return the image token kind of a model's family; None: not supported."""
    part = get_family(config.model_type).vision
    return part.image_tokens if part is not None else None


def frame_title(number: int) -> str:
    """Return InternVL's text before a frame of a video."""
    return f"Frame{number}: "


def with_image_marks(
    tokenizer: "PreTrainedTokenizerBase", config: McaModelConfig
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer whose rendered chats have the processor's image text with one placeholder.

    Gemma's templates write only the start mark. The processor adds the rest to the rendered text, where line breaks
    merge with adjacent ones into one token. Llama 4's write the mark before the tile of the whole image, and those
    of Aya Vision, Ovis 2 and Qianfan-OCR another word than the placeholder. InternVL's processor writes a title
    before the first frame of a video.
    """
    kind, fields = _kind(config), config.vision_fields
    if kind in ("tile_rows", "named_tiles", "word_marks", "word_tiles") and fields is not None:
        placeholder = tokenizer.convert_ids_to_tokens(placeholders(fields)[IMAGE])
        return with_image_text(tokenizer, "<|image|>" if kind == "tile_rows" else "<image>", placeholder)
    part = get_family(config.model_type).vision
    if part is not None and part.video_tokens == "numbered":
        return with_image_text(tokenizer, VIDEO_TAG, frame_title(1) + VIDEO_TAG)
    if kind != "fixed" or fields is None:
        return tokenizer
    return with_image_text(tokenizer, *image_tiles.gemma_image_text(tokenizer, fields))
