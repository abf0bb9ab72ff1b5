"""Image tokens of the model families, computed from the image size and checked against the image processor.

Qwen, GLM    a grid of patches, several of which are merged into one token
Kimi         the same grid, of an image that is padded at its ends
Cohere       tiles with a mark behind each (Command A Vision), or behind their number in words (Aya Vision)
InternVL     tiles with a fixed number of tokens, between two marks
Mistral 3    rows of tokens, each ending with a mark
Gemma 4      a grid of pooled patches, between two marks
Gemma 3      a fixed number of tokens per image, between two marks and empty lines
LLaVA        a fixed number of tokens per image
Llama 4      tiles with marks between them, and the whole image behind them
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import ImageSpan, placeholders
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import ImageTokenKind
from mca_train.data.chat import with_image_text
from mca_train.data.grids import Grid
from mca_train.data.image_tokens import ImageTokens
from mca_train.data.placeholders import VIDEO_TAG
from mca_train.data.pooled_patches import PooledTokens
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PatchTokens(ImageTokens):
    """Image tokens of Qwen and GLM.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.

    Raises:
        UsageError: The processor is not supported.
    """

    taken = ("pixel_values", "image_grid_thw")

    def __init__(self, processor: ImageProcessor, token: int) -> None:
        super().__init__(processor, token)
        self._sides = resized_sides(processor)

    def _computed(self, height: int, width: int) -> Grid:
        own = self.processor
        try:
            rows, columns = self._sides(height, width, own.temporal_patch_size)
            patches = own.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise McaError(f"an image of {width} x {height} pixels cannot be used: {error}") from error
        if rows * columns * own.merge_size**2 != patches:
            raise McaError(
                f"{type(own).__name__} makes {patches} patches of {width} x {height} pixels, which are not "
                f"{rows} x {columns} tokens; report it"
            )
        return Grid(rows, columns)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        merge = self.processor.merge_size
        return [Grid(rows // merge, columns // merge) for _, rows, columns in made["image_grid_thw"].tolist()]


class PaddedPatchTokens(ImageTokens):
    """Image tokens of Kimi: a grid of patches of an image that is padded at its ends.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        marks: Ids of the tokens before and after an image.
    """

    taken = PatchTokens.taken

    def __init__(
        self, processor: ImageProcessor, token: int, marks: tuple[Sequence[int], Sequence[int]]
    ) -> None:
        super().__init__(processor, token)
        self.before, self.after = marks
        resize = getattr(sys.modules[type(processor).__module__], "navit_resize", None)
        if resize is None:
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for Kimi; expected "
                "Kimi_K25ImageProcessor in preprocessor_config.json"
            )
        self._resize: Callable[..., tuple[tuple[int, int], tuple[int, int]]] = resize

    def _computed(self, height: int, width: int) -> Grid:
        own = self.processor
        largest = own.size["max_height"]
        _, (high, wide) = self._resize(
            height, width, own.patch_size, own.merge_size, own.max_patches, largest
        )
        return self._merged(high // own.patch_size, wide // own.patch_size)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [self._merged(rows, columns) for _, rows, columns in made["image_grid_thw"].tolist()]

    def _merged(self, rows: int, columns: int) -> Grid:
        merge = self.processor.merge_size
        return Grid(rows // merge, columns // merge)


def resized_sides(processor: ImageProcessor) -> Callable[[int, int, int], tuple[int, int]]:
    """Return the function from height, width and number of frames to the rows and columns of tokens.

    Args:
        processor: An image or video processor of patches.

    Raises:
        UsageError: The processor is not supported.
    """
    resize = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
    if resize is None or not hasattr(processor, "merge_size"):
        raise UsageError(
            f"{type(processor).__name__}: this processor is not supported; supported are those of "
            "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V, InternVL, Mistral 3, Gemma 3, LLaVA, Llama 4 and "
            "Kimi K2.5"
        )
    taken = set(inspect.signature(resize).parameters)

    def sides(height: int, width: int, frames: int) -> tuple[int, int]:
        factor = processor.patch_size * processor.merge_size
        known = {
            "height": height,
            "width": width,
            "factor": factor,
            "min_pixels": processor.size["shortest_edge"],
            "max_pixels": processor.size["longest_edge"],
            "num_frames": frames,
            "temporal_factor": processor.temporal_patch_size,
        }
        high, wide = resize(**{key: value for key, value in known.items() if key in taken})
        return high // factor, wide // factor

    return sides


class TileTokens(ImageTokens):
    """Image tokens of InternVL.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per tile.
        marks: Ids of the tokens before and after the placeholders of an image.
    """

    def __init__(self, processor: ImageProcessor, token: int, length: int, marks: tuple[int, int]) -> None:
        # the option that InternVL's processor passes to its image processor
        super().__init__(processor, token, crop_to_patches=True)
        self._length, self._marks = length, marks

    def _computed(self, height: int, width: int) -> Grid:
        tiles = self.processor.get_number_of_image_patches(height, width, self.options)
        return Grid(tiles, self._length)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [Grid(int(tiles), self._length) for tiles in made["num_patches"]]

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        return self._marks[:1], self._marks[1:]

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        return [self._marks[0], *super().ids(grid), self._marks[1]]


class MarkedTileTokens(TileTokens):
    """Image tokens of Command A Vision and Aya Vision: tiles with text before them, or a mark behind.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per tile.
        marks: Ids of the tokens before and after the tiles of an image.
        before: Function from the number of a tile and the number of tiles to the tokens before it.
        behind: Tokens behind each tile.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        length: int,
        marks: tuple[int, int],
        *,
        before: Callable[[int, int], list[int]] = lambda tile, tiles: [],
        behind: Sequence[int] = (),
    ) -> None:
        super().__init__(processor, token, length, marks)
        self._before, self._behind = before, behind

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        ids = self.ids(grid)
        return ids[: ids.index(self.token)], [*self._behind, self._marks[1]]

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        ids = [self._marks[0]]
        for tile in range(grid.rows):
            ids += [*self._before(tile, grid.rows), *[self.token] * grid.columns, *self._behind]
        return [*ids, self._marks[1]]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per tile."""
        return [ImageSpan(int(start), 1, grid.columns) for start in where[:: grid.columns]]


class LineTokens(ImageTokens):
    """Image tokens of Mistral 3.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        side: Side of a token in pixels.
        marks: Ids of the tokens at the end of a row, and of the last row.
    """

    taken = ("pixel_values", "image_sizes")

    def __init__(self, processor: ImageProcessor, token: int, side: int, marks: tuple[int, int]) -> None:
        super().__init__(processor, token, patch_size={"height": side, "width": side})
        self._side, self._marks = side, marks

    def _computed(self, height: int, width: int) -> Grid:
        longest = self.processor.size["longest_edge"]
        ratio = max(height / longest, width / longest, 1.0)
        sides = (height, width) if ratio == 1 else (int(height / ratio), int(width / ratio))
        if not min(sides):
            raise McaError(f"an image of {width} x {height} pixels cannot be used: it is too narrow")
        return Grid((sides[0] - 1) // self._side + 1, (sides[1] - 1) // self._side + 1)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [
            Grid(int(high) // self._side, int(wide) // self._side)
            for high, wide in made["image_sizes"].tolist()
        ]

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the mark after an image."""
        return (), self._marks[1:]

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including the marks at the ends of rows."""
        ids = ([self.token] * grid.columns + [self._marks[0]]) * grid.rows
        return [*ids[:-1], self._marks[1]]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per row of an image."""
        return [ImageSpan(int(where[row * grid.columns]), 1, grid.columns) for row in range(grid.rows)]


class PlainTokens(ImageTokens):
    """Image tokens of LLaVA: a fixed number of placeholders without marks.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per image.
        options: Options of the processor.
    """

    def __init__(self, processor: ImageProcessor, token: int, length: int, **options: object) -> None:
        super().__init__(processor, token, **options)
        self._length = length

    def _computed(self, height: int, width: int) -> Grid:
        return Grid(1, self._length)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [Grid(1, self._length) for _ in made["pixel_values"]]


class TileRowTokens(PlainTokens):
    """Image tokens of Llama 4: tiles in rows, with marks between them and at the ends of rows, then the whole image.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per tile.
        marks: Ids of the tokens before an image, between tiles, after a row of tiles, before the tile of the whole
            image, and after it.
    """

    def __init__(self, processor: ImageProcessor, token: int, length: int, marks: Sequence[int]) -> None:
        super().__init__(processor, token, length)
        self._marks = marks
        source = sys.modules[type(processor).__module__]
        try:
            canvases = source.find_supported_resolutions(processor.max_patches, processor.size)
            self._best_fit = partial(
                source.get_best_fit,
                possible_resolutions=torch.tensor(canvases),
                resize_to_max_canvas=processor.resize_to_max_canvas,
            )
        except AttributeError as error:
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for Llama 4; expected "
                "Llama4ImageProcessor in preprocessor_config.json"
            ) from error

    def _computed(self, height: int, width: int) -> Grid:
        high, wide = self._best_fit((height, width)).tolist()
        size = self.processor.size
        return self._tiles(high // size["height"], wide // size["width"])

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [self._tiles(rows, columns) for rows, columns in made["aspect_ratios"].tolist()]

    def _tiles(self, rows: int, columns: int) -> Grid:
        """Return the grid of an image that is cut into ``rows`` times ``columns`` tiles."""
        tiles = rows * columns
        return Grid(tiles + (tiles > 1), self._length, tile_rows=rows)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        start, between, row_end, whole, end = self._marks
        tile = [self.token] * grid.columns
        ids = [start]
        if grid.rows > 1:
            columns = (grid.rows - 1) // grid.tile_rows
            ids += [*([*tile, between] * (columns - 1)), *tile, row_end] * grid.tile_rows
        return [*ids, whole, *tile, end]

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        ids = self.ids(grid)
        return ids[: ids.index(self.token)], ids[-1:]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per tile."""
        return [ImageSpan(int(start), 1, grid.columns) for start in where[:: grid.columns]]


class FixedTokens(PlainTokens):
    """Image tokens of Gemma 3.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per image.
        marks: Ids of the tokens before and after the placeholders of an image.
        written: Text that the processor writes for an image, with one placeholder.
    """

    def __init__(
        self, processor: ImageProcessor, token: int, length: int, marks: tuple[int, int], written: str
    ) -> None:
        # the option that Gemma's processor passes to its image processor
        super().__init__(processor, token, length, do_pan_and_scan=False)
        self.before, self.after = marks[:1], marks[1:]
        self._written = written

    def mark(self, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Return the text that Gemma's processor writes for an image."""
        return self._written


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
    vision, processor = config.vision_fields, _processor(directories)
    token = placeholders(vision).get("image")
    if token is None:
        raise UsageError(f"config.json: image_token_id is missing, the placeholder of {config.model_type}")
    if kind == "plain":
        return PlainTokens(processor, token, _tokens_per_image(config))
    if kind == "tile_rows":
        return TileRowTokens(processor, token, _tokens_per_image(config), _ids(tokenizer, *_TILE_ROW_MARKS))
    if kind in ("tile_breaks", "named_tiles"):
        return _cohere_tiles(processor, token, config, tokenizer)
    if kind == "pooled":
        _require_window(config, processor)
    return _MAKERS[kind](processor, token, vision, tokenizer)


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


def _kind(config: McaModelConfig) -> ImageTokenKind | None:
    """Return the image token kind of a model's family; None: not supported."""
    part = get_family(config.model_type).vision
    return part.image_tokens if part is not None else None


def _patches(
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    made = PatchTokens(processor, token)
    made.before, made.after = (
        [vision[key] for key in (f"vision_{side}_token_id", f"image_{side}_token_id") if key in vision]
        for side in ("start", "end")
    )
    return made


def _padded_patches(
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    before, content, after = _ids(tokenizer, "<|media_begin|>", "<|media_content|>", "<|media_end|>")
    word = tokenizer("image", add_special_tokens=False)["input_ids"]
    return PaddedPatchTokens(processor, token, ([before, *word, content], [after]))


def _tiles(
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    first, last = internvl_marks(tokenizer)
    return TileTokens(processor, token, vision.get("image_seq_length", 256), (first, last))


def internvl_marks(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """Return the ids of the tokens around an image of InternVL."""
    first, last = _ids(tokenizer, "<img>", "</img>")
    return first, last


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
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    side = vision["vision_config"].get("patch_size", 16) * vision.get("spatial_merge_size", 2)
    row_end, last = _ids(tokenizer, "[IMG_BREAK]", "[IMG_END]")
    return LineTokens(processor, token, side, (row_end, last))


def _fixed(
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    length, written = vision.get("mm_tokens_per_image", 256), _gemma_image_text(tokenizer, vision)[1]
    return FixedTokens(processor, token, length, _gemma_marks(vision), written)


def _pooled(
    processor: ImageProcessor, token: int, vision: Values, tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    return PooledTokens(processor, token, pooled_marks(vision))


def pooled_marks(vision: Values) -> tuple[int, int]:
    """Return the ids of the tokens before and after an image of Gemma 4, or a frame."""
    return vision["boi_token_id"], vision["eoi_token_id"]


_Maker = Callable[[ImageProcessor, int, Values, "PreTrainedTokenizerBase"], ImageTokens]
_MAKERS: Mapping[str, _Maker] = {
    "patches": _patches,
    "padded_patches": _padded_patches,
    "tiles": _tiles,
    "lines": _lines,
    "fixed": _fixed,
    "pooled": _pooled,
}


def _processor(directories: Sequence[Path]) -> ImageProcessor:
    # without torchvision, transformers 5.17 exports a dummy class that raises an error
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    reasons = []
    for directory in directories:
        try:
            return AutoImageProcessor.from_pretrained(directory, backend="pil")
        except (OSError, ValueError, KeyError, ImportError) as error:
            reasons.append(f"{directory}: {' '.join(str(error).split())[:200]}")
    raise UsageError(f"rows have images, and there is no image processor: {'; '.join(reasons)}")


def _ids(tokenizer: "PreTrainedTokenizerBase", *marks: str) -> list[int]:
    known = tokenizer.get_vocab()
    if missing := [mark for mark in marks if mark not in known]:
        raise UsageError(f"the tokenizer has no token {', '.join(missing)} around images")
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
    merge with adjacent ones into one token. Llama 4's write the mark before the tile of the whole image, and Aya
    Vision's a word that is no token. InternVL's processor writes a title before the first frame of a video.
    """
    kind, vision = _kind(config), config.vision_fields
    if kind in ("tile_rows", "named_tiles") and vision is not None:
        placeholder = tokenizer.convert_ids_to_tokens(placeholders(vision)["image"])
        return with_image_text(tokenizer, "<|image|>" if kind == "tile_rows" else "<image>", placeholder)
    part = get_family(config.model_type).vision
    if part is not None and part.video_tokens == "numbered":
        return with_image_text(tokenizer, VIDEO_TAG, frame_title(1) + VIDEO_TAG)
    if kind != "fixed" or config.vision_fields is None:
        return tokenizer
    return with_image_text(tokenizer, *_gemma_image_text(tokenizer, config.vision_fields))
