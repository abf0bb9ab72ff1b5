"""Image processor of a checkpoint, and the image tokens that belong to it, by the kind that the model's family has.

The kinds themselves are in `patch_grids`, `image_tiles` and `pooled_patches`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import placeholders
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import ImageTokenKind
from mca_train.data.chat import with_image_text
from mca_train.data.grids import Grid
from mca_train.data.image_slices import SliceTokens
from mca_train.data.image_tiles import (
    FixedTokens,
    JoinedTileTokens,
    LoneTileTokens,
    MarkedTileTokens,
    PlainTokens,
    RowColumnTokens,
    ThumbnailTokens,
    TileRowTokens,
    TileTokens,
    WordMarkTokens,
)
from mca_train.data.image_tokens import ImageTokens, load_processor
from mca_train.data.patch_grids import LineTokens, PaddedPatchTokens, PatchTokens, WholeLineTokens
from mca_train.data.placeholders import VIDEO_TAG
from mca_train.data.pooled_patches import PooledTokens
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def image_tokens(
    config: McaModelConfig, directories: Sequence[Path], tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    """Return the image tokens of a model, whose image processor is in one of ``directories``.

    Raises:
        UsageError: The model does not support images, or there is no processor.
    """
    if config.vision_fields is None:
        raise UsageError(f"a {config.model_type} model does not support images; remove them from the rows")
    kind = _kind(config)
    if kind is None:
        raise UsageError(
            f"images of {config.model_type} are not supported in rows: mca does not write the tokens that its "
            "processor puts around an image; remove the images from the rows of the dataset"
        )
    processor, token = image_processor(directories), placeholders(config.vision_fields).get("image")
    if token is None:
        raise UsageError(
            f"config.json: image_token_id is missing, the placeholder of {config.model_type}"
            "; take the config.json that was published with the model"
        )
    if kind == "pooled":
        _require_window(config, processor)
    return _MAKERS[kind](processor, token, config, tokenizer)


def _require_window(config: McaModelConfig, processor: ImageProcessor) -> None:
    """Raise an error for images that a sliding window cuts; in transformers their tokens see more than the window."""
    part, window = get_family(config.model_type).vision, config.attention.window_size
    if part is None or part.windowed or not part.reach(config) or window is None:
        return
    if (most := getattr(processor, "max_soft_tokens", 0)) > window:
        raise UsageError(
            f"preprocessor_config.json: max_soft_tokens is {most}, more than the sliding window of {config.model_type} "
            f"({window} tokens); set it to a smaller one of 70, 140, 280, 560"
        )


_TILE_ROW_MARKS = (
    *("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<|image|>", "<|image_end|>"),
)


def _tokens_per_image(config: McaModelConfig) -> int:
    part = get_family(config.model_type).vision
    assert part is not None and part.tokens_per_image is not None, "plain image tokens have a fixed number"
    return part.tokens_per_image(config)


def size_tokens(config: McaModelConfig) -> Callable[[int, int], int]:
    """Return the function from the height and width of an image, or its patches, to its tokens."""
    part = get_family(config.model_type).vision
    assert part is not None and part.tokens_of_size is not None, "the size of an image gives its tokens"
    return partial(part.tokens_of_size, config)


def _kind(config: McaModelConfig) -> ImageTokenKind | None:
    """Return the image token kind of a model's family; None: not supported."""
    part = get_family(config.model_type).vision
    return part.image_tokens if part is not None else None


def _vision(config: McaModelConfig) -> Values:
    assert config.vision_fields is not None, "a model with image tokens has a vision model"
    return config.vision_fields


def _plain(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    return PlainTokens(processor, token, _tokens_per_image(config))


def _enclosed(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    made = _plain(processor, token, config, tokenizer)
    made.before, made.after = ([mark] for mark in internvl_marks(tokenizer))
    return made


def _tile_rows(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    return TileRowTokens(processor, token, _tokens_per_image(config), _ids(tokenizer, *_TILE_ROW_MARKS))


def _joined_tiles(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    grids = _vision(config).get("image_grid_pinpoints")
    count, part = size_tokens(config), get_family(config.model_type).vision
    if part is not None and part.tokens_together is not None:
        return LoneTileTokens(processor, token, count, grids, part.tokens_together(config))
    return JoinedTileTokens(processor, token, count, grids)


def _patches(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    vision, made = _vision(config), PatchTokens(processor, token)
    made.before, made.after = (
        [vision[key] for key in (f"vision_{side}_token_id", f"image_{side}_token_id") if key in vision]
        for side in ("start", "end")
    )
    return made


def _padded_patches(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    before, content, after = _ids(tokenizer, "<|media_begin|>", "<|media_content|>", "<|media_end|>")
    word = tokenizer("image", add_special_tokens=False)["input_ids"]
    return PaddedPatchTokens(processor, token, ([before, *word, content], [after]))


def _tiles(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    first, last = internvl_marks(tokenizer)
    length = _vision(config).get("image_seq_length", 256)
    return TileTokens(processor, token, length, (first, last))


def internvl_marks(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """Return the ids of the tokens around an image of InternVL."""
    first, last = _ids(tokenizer, "<img>", "</img>")
    return first, last


def _row_column_tiles(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    edge = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(tokenizer, "global_image_token", "<global-img>")
    _ids(tokenizer, edge)
    length = _tokens_per_image(config)
    tile = tokenizer.convert_ids_to_tokens(token) * length

    def write(rows: int, columns: int) -> list[int]:
        lines = [
            "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        words = "".join(lines) + "\n" * bool(rows) + edge + whole + tile + edge
        found: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
        return found

    return RowColumnTokens(processor, token, length, write)


def _thumbnail_tiles(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    names = ("image_start_token", "image_thumbnail_token", "image_end_token")
    usual = ("<|image_start|>", "<|img_thumbnail|>", "<|image_end|>")
    marks = [getattr(tokenizer, name, mark) for name, mark in zip(names, usual, strict=True)]
    first, thumbnail, last = _ids(tokenizer, *marks)

    def write(rows: int, columns: int, tile: int, whole: int) -> list[int]:
        ids = [first]
        if rows * columns > 1:
            for row, column in product(range(1, rows + 1), range(1, columns + 1)):
                ids += [*_ids(tokenizer, f"<|img_row_{row}_col_{column}|>"), *[token] * tile]
            ids += [thumbnail] * bool(whole)
        return [*ids, *[token] * whole, last]

    return ThumbnailTokens(processor, token, write)


def _numbered_slices(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    write = slice_writer(tokenizer, token, numbered=getattr(processor, "use_image_id", True))
    mode = _vision(config).get("downsample_mode", "16x")
    return SliceTokens(processor, token, mode, size_tokens(config), write)


def slice_writer(
    tokenizer: "PreTrainedTokenizerBase", token: int, *, numbered: bool
) -> Callable[[Grid], list[int]]:
    """Return the function that writes MiniCPM-V's tokens of an image, or of each frame of a video.

    Args:
        tokenizer: The tokenizer.
        token: Id of the placeholder token.
        numbered: The number of the image or the video is in front of it.
    """
    usual = {f"image_{side}_token": mark for side, mark in (("start", "<image>"), ("end", "</image>"))}
    usual |= {f"slice_{side}_token": mark for side, mark in (("start", "<slice>"), ("end", "</slice>"))}
    if numbered:
        usual |= {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}
    known = {name: getattr(tokenizer, name, mark) for name, mark in usual.items()}
    marks = dict(zip(known, _ids(tokenizer, *known.values()), strict=True))

    def spell(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def piece(kind: str, length: int) -> list[int]:
        return [marks[f"{kind}_start_token"], *[token] * length, marks[f"{kind}_end_token"]]

    def write(grid: Grid) -> list[int]:
        whole = grid.columns - grid.tile_rows * grid.tile_columns * grid.tile_tokens
        row = piece("slice", grid.tile_tokens) * grid.tile_columns
        rows = row + (spell("\n") + row) * (grid.tile_rows - 1) if grid.tile_rows else []
        frame = [*piece("image", whole), *rows] * max(grid.frames, 1)
        if not numbered:
            return frame
        return [marks["image_id_start_token"], *spell(str(grid.number)), marks["image_id_end_token"], *frame]

    return write


_WORD_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def _word_marks(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    marks, known = _ids(tokenizer, *_WORD_MARKS), _vision(config).get("visual_indicator_token_ids")
    if known is None or list(known) != marks:
        raise UsageError(
            f"config.json: visual_indicator_token_ids is {known}; expected {marks}, the tokenizer's of "
            f"{', '.join(_WORD_MARKS)}"
        )
    return WordMarkTokens(processor, token, _tokens_per_image(config), marks)


_COHERE_MARKS = ("<|START_OF_IMG|>", "<|END_OF_IMG|>")


def _cohere_tiles(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    length = _tokens_per_image(config)
    first, last = _ids(tokenizer, *_COHERE_MARKS)
    if _kind(config) == "tile_breaks":
        behind = _ids(tokenizer, "<|IMG_LINE_BREAK|>")
        return MarkedTileTokens(processor, token, length, (first, last), behind=behind)

    def name(tile: int, tiles: int) -> list[int]:
        words = "TILE_GLOBAL" if tile == tiles - 1 else f"TILE_{tile + 1}"
        found: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
        return found

    return MarkedTileTokens(processor, token, length, (first, last), before=name)


def _lines(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    vision = _vision(config)
    side = vision["vision_config"].get("patch_size", 16) * vision.get("spatial_merge_size", 2)
    row_end, last = _ids(tokenizer, "[IMG_BREAK]", "[IMG_END]")
    return LineTokens(processor, token, side, (row_end, last))


def _whole_lines(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    vision = _vision(config)
    patch, merge = vision["vision_config"].get("patch_size", 16), vision.get("spatial_merge_size", 2)
    return WholeLineTokens(processor, token, patch, merge)


def _fixed(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    vision = _vision(config)
    length, written = vision.get("mm_tokens_per_image", 256), _gemma_image_text(tokenizer, vision)[1]
    return FixedTokens(processor, token, length, _gemma_marks(vision), written)


def _pooled(
    processor: ImageProcessor, token: int, config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    return PooledTokens(processor, token, pooled_marks(_vision(config)))


def pooled_marks(vision: Values) -> tuple[int, int]:
    """Return the ids of the tokens before and after an image of Gemma 4, or a frame."""
    return vision["boi_token_id"], vision["eoi_token_id"]


_Maker = Callable[[ImageProcessor, int, McaModelConfig, "PreTrainedTokenizerBase"], ImageTokens]
_MAKERS: Mapping[str, _Maker] = {
    "patches": _patches,
    "padded_patches": _padded_patches,
    "tiles": _tiles,
    "lines": _lines,
    "whole_lines": _whole_lines,
    "fixed": _fixed,
    "pooled": _pooled,
    "plain": _plain,
    "enclosed": _enclosed,
    "tile_rows": _tile_rows,
    "tile_breaks": _cohere_tiles,
    "named_tiles": _cohere_tiles,
    "joined_tiles": _joined_tiles,
    "row_column_tiles": _row_column_tiles,
    "thumbnail_tiles": _thumbnail_tiles,
    "numbered_slices": _numbered_slices,
    "word_marks": _word_marks,
    "word_tiles": _tiles,
}


def image_processor(directories: Sequence[Path]) -> ImageProcessor:
    """Return the image processor in the first of ``directories`` that has one."""
    # without torchvision, transformers 5.17 exports a dummy class that raises an error
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return load_processor(
        directories,
        partial(AutoImageProcessor.from_pretrained, backend="pil"),
        "rows have images, and there is no image processor",
    )


def _ids(tokenizer: "PreTrainedTokenizerBase", *marks: str) -> list[int]:
    known = tokenizer.get_vocab()
    if missing := [mark for mark in marks if mark not in known]:
        raise UsageError(
            f"the tokenizer has no token {', '.join(missing)} around images"
            "; set tokenizer_name_or_path to the model's own"
        )
    return [known[mark] for mark in marks]


def _gemma_marks(vision: Values) -> tuple[int, int]:
    return vision.get("boi_token_index", 255999), vision.get("eoi_token_index", 256000)


def _gemma_image_text(tokenizer: "PreTrainedTokenizerBase", vision: Values) -> tuple[str, str]:
    """Return Gemma's image token in text, and the processor's replacement with one placeholder."""
    before, after = _gemma_marks(vision)
    ids = [before, vision.get("image_token_id", vision.get("image_token_index", 262144)), after]
    first, placeholder, last = tokenizer.convert_ids_to_tokens(ids)
    return first, f"\n\n{first}{placeholder}{last}\n\n"


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
    kind, vision = _kind(config), config.vision_fields
    if kind in ("tile_rows", "named_tiles", "word_marks", "word_tiles") and vision is not None:
        placeholder = tokenizer.convert_ids_to_tokens(placeholders(vision)["image"])
        return with_image_text(tokenizer, "<|image|>" if kind == "tile_rows" else "<image>", placeholder)
    part = get_family(config.model_type).vision
    if part is not None and part.video_tokens == "numbered":
        return with_image_text(tokenizer, VIDEO_TAG, frame_title(1) + VIDEO_TAG)
    if kind != "fixed" or config.vision_fields is None:
        return tokenizer
    return with_image_text(tokenizer, *_gemma_image_text(tokenizer, config.vision_fields))
