"""Image tokens of tiles, each with the same number of placeholders.

LLaVA        one tile for each image
Gemma 3      the same between two marks and empty lines
InternVL     several tiles between two marks
Cohere       tiles with a mark behind each (Command A Vision), or behind their number in words (Aya Vision)
Llama 4      tiles with marks between them, and the whole image behind them
Idefics 3    tiles behind their row and column (SmolVLM too), and the whole image behind them
LFM2-VL      the same, with the whole image in its own proportions
Ovis 2       the whole image before its tiles, with marks between them, for which the tower has features
LLaVA-NeXT   tiles whose features are joined without their padding, behind those of the whole image; LLaVA-OneVision
             does so with the only image of a sequence, and sees several as a whole
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mca_config.errors import UsageError
from mca_models.media import ImageSpan, tile_order
from mca_models.megatron.features.sequence_media import join_tensors
from mca_train.data.grids import Grid
from mca_train.data.image_tokens import ImageTokens, locate_runs, require_unchanged
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.image_files import ImageFile


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


class SeparateTileTokens(PlainTokens):
    """Image tokens of tiles with marks between them; one mark follows the last tile."""

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        ids = self.ids(grid)
        return ids[: ids.index(self.token)], ids[-1:]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per tile."""
        return [ImageSpan(int(start), 1, grid.columns) for start in where[:: grid.columns]]


class TileRowTokens(SeparateTileTokens):
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


class RowColumnTokens(SeparateTileTokens):
    """Image tokens of Idefics 3 and SmolVLM: tiles behind their row and column, then the whole image.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per tile.
        write: Function from rows and columns of tiles, 0 of an image that is not cut, to the tokens of an image.
    """

    def __init__(
        self, processor: ImageProcessor, token: int, length: int, write: Callable[[int, int], list[int]]
    ) -> None:
        super().__init__(processor, token, length, return_row_col_info=True)
        self._write = lru_cache(write)
        source = sys.modules[type(processor).__module__]
        try:
            self._rescale = source._resize_output_size_rescale_to_max_len
            self._bound = partial(
                source._resize_output_size_scale_below_upper_bound, max_len=source.MAX_IMAGE_SIZE
            )
            self._side = processor.max_image_size["longest_edge"]
        except AttributeError as error:
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for Idefics 3 and SmolVLM; expected "
                "Idefics3ImageProcessor or SmolVLMImageProcessor in preprocessor_config.json"
            ) from error

    def _computed(self, height: int, width: int) -> Grid:
        own, side = self.processor, self._side
        if not own.do_image_splitting:
            return self._tiles(0, 0)
        if own.do_resize:
            height, width = self._bound(*self._rescale(height, width, max_len=own.size["longest_edge"]))
        ratio = width / height
        if width >= height:
            width = ceil(width / side) * side
            height = ceil(int(width / ratio) / side) * side
        else:
            height = ceil(height / side) * side
            width = ceil(int(height * ratio) / side) * side
        is_cut = max(height, width) > side
        return self._tiles(height // side * is_cut, width // side * is_cut)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        (rows,), (columns,) = made["rows"], made["cols"]
        return [self._tiles(int(row), int(column)) for row, column in zip(rows, columns, strict=True)]

    def _tiles(self, rows: int, columns: int) -> Grid:
        """Return the grid of an image that is cut into ``rows`` times ``columns`` tiles."""
        return Grid(rows * columns + 1, self._length, tile_rows=rows)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        columns = (grid.rows - 1) // grid.tile_rows if grid.tile_rows else 0
        return list(self._write(grid.tile_rows, columns))

    def _taken(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": made["pixel_values"][0][:, None]}


class WordMarkTokens(PlainTokens):
    """Image tokens of Ovis 2: the whole image before its tiles, with marks between them that have features too.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        length: Placeholders per tile.
        marks: Ids of the marks of `tile_order`.
    """

    taken = ("pixel_values", "grids")

    def __init__(self, processor: ImageProcessor, token: int, length: int, marks: Sequence[int]) -> None:
        super().__init__(processor, token, length)
        self._marks, source = marks, sys.modules[type(processor).__module__]
        try:
            self._layouts = (source.get_min_tile_covering_grid, source.get_optimal_tiled_canvas)
        except AttributeError as error:
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for Ovis 2; expected "
                "Ovis2ImageProcessor in preprocessor_config.json"
            ) from error

    def _computed(self, height: int, width: int) -> Grid:
        own, (covering, closest) = self.processor, self._layouts
        if not own.crop_to_patches or own.max_patches < 2:
            return self._tiles(1, 1)
        side, most = (own.size["height"], own.size["width"]), own.max_patches
        if own.use_covering_area_grid:
            columns, rows = covering((height, width), target_patch_size=side[0], max_image_tiles=most)
        else:
            columns, rows = closest((height, width), side, own.min_patches, most)
        return self._tiles(rows, columns)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [self._tiles(rows, columns) for rows, columns in made["grids"].tolist()]

    def _tiles(self, rows: int, columns: int) -> Grid:
        """Return the grid of an image that is cut into ``rows`` times ``columns`` tiles."""
        return Grid(tile_order(rows, columns).count(None), self._length, tile_rows=rows)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        order = tile_order(grid.tile_rows, max(grid.rows - 1, 1) // grid.tile_rows)
        tile = [self.token] * grid.columns
        return [token for mark in order for token in (tile if mark is None else [self._marks[mark]])]

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        return self._marks[:1], self._marks[4:] if grid.rows > 1 else [self._marks[1], self._marks[4]]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the location of an image with its marks."""
        return [ImageSpan(int(where[0]) - 1, 1, len(self.ids(grid)))]


class JoinedTileTokens(ImageTokens):
    """Image tokens of LLaVA-NeXT: placeholders without marks, whose number follows from the image's size.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        count: Function from the height and width of an image to its number of placeholders.
        grids: Sizes of tiled images of the model; None: the processor's.
    """

    taken: tuple[str, ...] = ("pixel_values", "image_sizes")

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        count: Callable[[int, int], int],
        grids: Sequence[Sequence[int]] | None,
    ) -> None:
        super().__init__(processor, token)
        self._count = count
        found = [list(each) for each in getattr(processor, "image_grid_pinpoints", None) or ()]
        if found != (found if grids is None else [list(each) for each in grids]):
            raise UsageError(
                f"preprocessor_config.json: image_grid_pinpoints is {found}, but the model's in config.json is "
                f"{grids}; use the processor of this model"
            )

    def _computed(self, height: int, width: int) -> Grid:
        return Grid(1, self._count(height, width))

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return [self._computed(height, width) for height, width in made["image_sizes"].tolist()]


class ThumbnailTokens(ImageTokens):
    """Image tokens of LFM2-VL: tiles behind their row and column, then the whole image in its own proportions.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        write: Function from rows and columns of tiles, and the placeholders of a tile and of the whole image, to the
            tokens of an image.
    """

    taken = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def __init__(
        self, processor: ImageProcessor, token: int, write: Callable[[int, int, int, int], list[int]]
    ) -> None:
        super().__init__(processor, token, return_row_col_info=True)
        self._write = lru_cache(write)
        if not hasattr(processor, "encoder_patch_size"):
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for LFM2-VL; expected "
                "Lfm2VlImageProcessor in preprocessor_config.json"
            )
        self._side = processor.encoder_patch_size * processor.downsample_factor
        self._tile = (processor.tile_size // self._side) ** 2

    def _computed(self, height: int, width: int) -> Grid:
        own = self.processor
        patch, factor, most = own.encoder_patch_size, own.downsample_factor, own.max_image_tokens
        wide, high = own.smart_resize(height, width, factor, own.min_image_tokens, most, patch)
        whole = (high // self._side) * (wide // self._side)
        is_large = own._is_image_too_large(height, width, most, patch, factor, own.max_pixels_tolerance)
        if not (own.do_image_splitting and is_large and own.max_tiles > 1):
            return Grid(1, whole)
        columns, rows, *_ = own._get_grid_layout(height, width, own.min_tiles, own.max_tiles, own.tile_size)
        tokens = rows * columns * self._tile + whole * own.use_thumbnail
        return Grid(1, tokens, tile_rows=rows, tile_columns=columns)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        left = (made["spatial_shapes"] // self.processor.downsample_factor).prod(1).tolist()
        found = []
        for rows, columns in zip(made["image_rows"], made["image_cols"], strict=True):
            tiles = int(rows) * int(columns)
            count = tiles + (tiles > 1 and self.processor.use_thumbnail)
            found.append(Grid(1, sum(left[:count]), tile_rows=int(rows), tile_columns=int(columns)))
            left = left[count:]
        return found

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        tiles = grid.tile_rows * grid.tile_columns
        whole = grid.columns - tiles * self._tile if tiles > 1 else grid.columns
        return list(self._write(grid.tile_rows, grid.tile_columns, self._tile, whole))

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        ids = self.ids(grid)
        return ids[: ids.index(self.token)], ids[-1:]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location per tile."""
        return locate_runs(where)

    def _taken(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        most = int(made["pixel_attention_mask"].sum(1).max())
        kept = {name: made[name][:, :most] for name in self.taken[:2]}
        return {**kept, self.taken[2]: made[self.taken[2]]}


class LoneTileTokens(JoinedTileTokens):
    """Image tokens of LLaVA-OneVision, where only the image of a sequence with one is cut into tiles.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        count: Function from the height and width of a lone image to its number of placeholders.
        grids: Sizes of tiled images of the model.
        together: Placeholders of an image next to others.
    """

    taken = (*JoinedTileTokens.taken, "batch_num_images")

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        count: Callable[[int, int], int],
        grids: Sequence[Sequence[int]] | None,
        together: int,
    ) -> None:
        super().__init__(processor, token, count, grids)
        self._together = Grid(1, together, tile_rows=0)

    def in_sequence(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return the grids of the media of one sequence."""
        if sum(grid.medium == "image" for grid in grids) < 2:
            return list(grids)
        return [self._together if grid.medium == "image" else grid for grid in grids]

    def tensors(self, files: "Sequence[ImageFile]", grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``files``, whose placeholders are ``grids``."""
        return join_tensors([self._one(file, grid) for file, grid in zip(files, grids, strict=True)])

    def _one(self, file: "ImageFile", grid: Grid) -> dict[str, Tensor]:
        copies = 1 if grid.tile_rows else 2  # the processor does not cut an image next to another
        made = dict(self.processor(images=[[file.pixels()] * copies], return_tensors="pt").data)
        require_unchanged(f"image {file.place}", grid, self._made(made)[0] if copies == 1 else self._together)
        kept = {name: made[name][:1] for name in JoinedTileTokens.taken}
        return {**kept, self.taken[-1]: torch.tensor([copies])}
