"""Image tokens of tiles, most with the same number of placeholders for each.

LLaVA        one tile for each image
InternVL     several tiles between two marks; some families have one
Gemma 3      one tile between two marks and empty lines
Cohere       tiles with a mark behind each (Command A Vision), or behind their number in words (Aya Vision)
Llama 4      tiles with marks between them, and the whole image behind them
Idefics 3    tiles behind their row and column (SmolVLM too), and the whole image behind them
LFM2-VL      the same, with the whole image in its own proportions
MiniCPM-V    the whole image behind its number, and its tiles (slices), all in their own proportions
Ovis 2       the whole image before its tiles, with marks between them, for which the tower has features
LLaVA-NeXT   tiles whose features are joined without their padding, behind those of the whole image; LLaVA-OneVision
             does so with the only image of a sequence, and sees several as a whole
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mca_config.errors import UsageError
from mca_config.types import Values
from mca_models.media import ImageSpan, tile_order
from mca_models.megatron.features.media_features import split_patches
from mca_models.megatron.features.sequence_media import join_tensors
from mca_train.data.medium_tokens import Grid, ImageTokens, MediaContext, expecting, require_unchanged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.image_files import ImageFile

INTERNVL_MARKS = ("<img>", "</img>")
"""Tokens around an image of InternVL, or a frame."""


class PlainTokens(ImageTokens):
    """Image tokens of LLaVA: a fixed number of placeholders without marks.

    Args:
        context: Image processor and model.
        length: Placeholders of an image or a tile; None: the number that the family's tower makes.
    """

    def __init__(self, context: MediaContext, length: int | None = None) -> None:
        super().__init__(context)
        self._length: int = context.tokens_per_image if length is None else length

    def _computed(self, height: int, width: int) -> Grid:
        return Grid(1, self._length)

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return [Grid(1, self._length) for _ in made["pixel_values"]]


class EnclosedTokens(PlainTokens):
    """Image tokens of a fixed number, around which chat templates write InternVL's marks."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self.before, self.after = ([mark] for mark in context.ids(*INTERNVL_MARKS))


class FixedTokens(PlainTokens):
    """Image tokens of Gemma 3."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context, context.fields.get("mm_tokens_per_image", 256))
        self.before, self.after = ([mark] for mark in _gemma_marks(context.fields))
        self.options = {"do_pan_and_scan": False}

    def mark(self) -> str:
        """Return the text that Gemma's processor writes for an image."""
        return gemma_image_text(self.context.tokenizer, self.context.fields)[1]


def _gemma_marks(fields: Values) -> tuple[int, int]:
    return fields.get("boi_token_index", 255999), fields.get("eoi_token_index", 256000)


def gemma_image_text(tokenizer: "PreTrainedTokenizerBase", fields: Values) -> tuple[str, str]:
    """Return Gemma's image token in text, and the processor's replacement with one placeholder."""
    before, after = _gemma_marks(fields)
    ids = [before, fields.get("image_token_id", fields.get("image_token_index", 262144)), after]
    first, placeholder, last = tokenizer.convert_ids_to_tokens(ids)
    return first, f"\n\n{first}{placeholder}{last}\n\n"


class TileTokens(PlainTokens):
    """Image tokens of InternVL: tiles between two marks."""

    edges = INTERNVL_MARKS
    """Texts of the marks."""

    def __init__(self, context: MediaContext, length: int | None = None) -> None:
        super().__init__(context, context.fields.get("image_seq_length", 256) if length is None else length)
        self._first, self._last = context.ids(*self.edges)
        self.enclosing = [self._first], [self._last]
        self.options = {"crop_to_patches": True}

    def _computed(self, height: int, width: int) -> Grid:
        tiles = self.processor.get_number_of_image_patches(height, width, self.options)
        return Grid(tiles, self._length)

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return [Grid(int(tiles), self._length) for tiles in made["num_patches"]]


class NamedTileTokens(TileTokens):
    """Image tokens of Aya Vision: tiles behind their number in words."""

    edges = ("<|START_OF_IMG|>", "<|END_OF_IMG|>")

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context, context.tokens_per_image)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        tiles = (self._tile(tile, grid) for tile in range(grid.rows))
        return [self._first, *(token for tile in tiles for token in tile), self._last]

    def _tile(self, tile: int, grid: Grid) -> list[int]:
        """Return the tokens of one tile, including its marks."""
        name = "TILE_GLOBAL" if tile == grid.rows - 1 else f"TILE_{tile + 1}"
        return [*self.context.spell(name), *[self.token] * grid.columns]


class BreakTileTokens(NamedTileTokens):
    """Image tokens of Command A Vision: tiles with a mark behind each."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self._behind = context.ids("<|IMG_LINE_BREAK|>")

    def _tile(self, tile: int, grid: Grid) -> list[int]:
        return [*[self.token] * grid.columns, *self._behind]


class TileRowTokens(PlainTokens):
    """Image tokens of Llama 4: tiles in rows, with marks between them and at the ends of rows, then the whole image."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        marks = ("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")
        self._marks, processor = context.ids("<|image_start|>", *marks), self.processor
        with expecting(processor, "Llama 4", "Llama4ImageProcessor") as source:
            canvases = source.find_supported_resolutions(processor.max_patches, processor.size)
            self._best_fit = partial(
                source.get_best_fit,
                possible_resolutions=torch.tensor(canvases),
                resize_to_max_canvas=processor.resize_to_max_canvas,
            )

    def _computed(self, height: int, width: int) -> Grid:
        high, wide = self._best_fit((height, width)).tolist()
        size = self.processor.size
        return self._tiles(high // size["height"], wide // size["width"])

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
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


class RowColumnTokens(PlainTokens):
    """Image tokens of Idefics 3 and SmolVLM: tiles behind their row and column, then the whole image."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self.options = {"return_row_col_info": True}
        self._edge = getattr(context.tokenizer, "fake_image_token", "<fake_token_around_image>")
        context.ids(self._edge)
        self._write = lru_cache(self._written)
        expected = "Idefics3ImageProcessor or SmolVLMImageProcessor"
        with expecting(self.processor, "Idefics 3 and SmolVLM", expected) as source:
            self._rescale = source._resize_output_size_rescale_to_max_len
            self._bound = partial(
                source._resize_output_size_scale_below_upper_bound, max_len=source.MAX_IMAGE_SIZE
            )
            self._side = self.processor.max_image_size["longest_edge"]

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

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        (rows,), (columns,) = made["rows"], made["cols"]
        return [self._tiles(int(row), int(column)) for row, column in zip(rows, columns, strict=True)]

    def _tiles(self, rows: int, columns: int) -> Grid:
        """Return the grid of an image that is cut into ``rows`` times ``columns`` tiles."""
        return Grid(rows * columns + 1, self._length, tile_rows=rows)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        return list(self._write(grid.tile_rows, (grid.rows - 1) // grid.tile_rows if grid.tile_rows else 0))

    def _written(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of an image that is cut into ``rows`` times ``columns`` tiles; 0: it is not cut."""
        tokenizer, edge = self.context.tokenizer, self._edge
        whole = getattr(tokenizer, "global_image_token", "<global-img>")
        tile = tokenizer.convert_ids_to_tokens(self.token) * self._length
        lines = (
            "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return self.context.spell("".join(lines) + "\n" * bool(rows) + edge + whole + tile + edge)

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": made["pixel_values"][0][:, None]}


_WORD_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


class WordMarkTokens(PlainTokens):
    """Image tokens of Ovis 2: the whole image before its tiles, with marks between them that have features too."""

    taken = ("pixel_values", "grids")

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self._marks, known = context.ids(*_WORD_MARKS), context.fields.get("visual_indicator_token_ids")
        if known is None or list(known) != self._marks:
            raise UsageError(
                f"config.json: visual_indicator_token_ids is {known}; expected {self._marks}, the tokenizer's of "
                f"{', '.join(_WORD_MARKS)}"
            )
        with expecting(self.processor, "Ovis 2", "Ovis2ImageProcessor") as source:
            self._layouts = (source.get_min_tile_covering_grid, source.get_optimal_tiled_canvas)

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

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return [self._tiles(rows, columns) for rows, columns in made["grids"].tolist()]

    def _tiles(self, rows: int, columns: int) -> Grid:
        """Return the grid of an image that is cut into ``rows`` times ``columns`` tiles."""
        return Grid(tile_order(rows, columns).count(None), self._length, tile_rows=rows)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        order = tile_order(grid.tile_rows, max(grid.rows - 1, 1) // grid.tile_rows)
        tile = [self.token] * grid.columns
        return [token for mark in order for token in (tile if mark is None else [self._marks[mark]])]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the location of an image with its marks."""
        return [ImageSpan(int(where[0]) - 1, 1, len(self.ids(grid)))]


class ThumbnailTokens(ImageTokens):
    """Image tokens of LFM2-VL: tiles behind their row and column, then the whole image in its own proportions."""

    taken = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self.options = {"return_row_col_info": True}
        self._marks = context.named_ids(
            image_start_token="<|image_start|>",
            image_thumbnail_token="<|img_thumbnail|>",
            image_end_token="<|image_end|>",
        )
        with expecting(self.processor, "LFM2-VL", "Lfm2VlImageProcessor"):
            self._side = self.processor.encoder_patch_size * self.processor.downsample_factor
            self._tile = (self.processor.tile_size // self._side) ** 2
        self._place_marks = lru_cache(self._place_ids)

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

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
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
        first, thumbnail, last = self._marks.values()
        rows, columns, whole, ids = grid.tile_rows, grid.tile_columns, grid.columns, [first]
        if rows * columns > 1:
            for mark in self._place_marks(rows, columns):
                ids += [mark, *[self.token] * self._tile]
            whole -= rows * columns * self._tile
            ids += [thumbnail] * bool(whole)
        return [*ids, *[self.token] * whole, last]

    def _place_ids(self, rows: int, columns: int) -> list[int]:
        places = product(range(1, rows + 1), range(1, columns + 1))
        return self.context.ids(*(f"<|img_row_{row}_col_{column}|>" for row, column in places))

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        most = int(made["pixel_attention_mask"].sum(1).max())
        kept = {name: made[name][:, :most] for name in self.taken[:2]}
        return {**kept, self.taken[2]: made[self.taken[2]]}


class SliceTokens(ImageTokens):
    """Image tokens of MiniCPM-V.

    Args:
        context: Image or video processor and model.
        numbered: The number of the image or the video is in front of it; None: if the processor says so.
    """

    taken = ("pixel_values", "target_sizes")

    def __init__(self, context: MediaContext, *, numbered: bool | None = None) -> None:
        super().__init__(context)
        self._numbered = getattr(self.processor, "use_image_id", True) if numbered is None else numbered
        self._mode = context.fields.get("downsample_mode", "16x")
        self.options = {"downsample_mode": self._mode}
        marks = {
            f"{kind}_{side}_token": f"<{end}{kind}>" for kind in ("image", "slice") for side, end in _SIDES
        }
        if self._numbered:
            marks |= {f"image_id_{side}_token": f"<{end}image_id>" for side, end in _SIDES}
        self._marks = context.named_ids(**marks)
        expected, more = "MiniCPMV4_6ImageProcessor", ", with do_resize true"
        with expecting(self.processor, "MiniCPM-V", expected, more):
            self._sliced_grid = self.processor.get_sliced_grid
            if not self.processor.do_resize:
                raise AttributeError("do_resize is false")

    def _computed(self, height: int, width: int) -> Grid:
        own, size = self.processor, (height, width)
        slices = self._sliced_grid(size, own.max_slice_nums, own.scale_resolution) if own.slice_mode else None
        sizes = {"scale_resolution": own.scale_resolution, "patch_size": own.patch_size, **self.options}
        whole = own.find_best_resize(size, **sizes, allow_upscale=slices is None)
        if slices is None:
            return self.sliced(0, 0, [self._count_features(*whole)])
        rows, columns = slices
        high, wide = own.get_refine_size(size, slices, **sizes, allow_upscale=True)
        features = [self._count_features(*whole), self._count_features(high // rows, wide // columns)]
        return self.sliced(rows, columns, features)

    def _count_features(self, height: int, width: int) -> int:
        patch = self.processor.patch_size
        return self.context.tokens_of_size(height // patch, width // patch)

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        left = [self.context.tokens_of_size(high, wide) for high, wide in made["target_sizes"].tolist()]
        found = []
        for (rows, columns), number in zip(made["grids"], made["num_patches_per_image"], strict=True):
            found.append(self.sliced(int(rows), int(columns), left[:number]))
            left = left[number:]
        return found

    @staticmethod
    def sliced(rows: int, columns: int, features: Sequence[int]) -> Grid:
        """Return the grid of an image with these ``features`` of the whole and of a slice."""
        whole, piece = features[0], features[-1]
        tokens = whole + rows * columns * piece
        return Grid(1, tokens, tile_rows=rows, tile_columns=columns, tile_tokens=piece)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, or of each frame of a video, including its number and marks."""
        spell, marks = self.context.spell, self._marks

        def piece(kind: str, length: int) -> list[int]:
            return [marks[f"{kind}_start_token"], *[self.token] * length, marks[f"{kind}_end_token"]]

        whole = grid.columns - grid.tile_rows * grid.tile_columns * grid.tile_tokens
        row = piece("slice", grid.tile_tokens) * grid.tile_columns
        rows = row + (spell("\n") + row) * (grid.tile_rows - 1) if grid.tile_rows else []
        frames = [*piece("image", whole), *rows] * max(grid.frames, 1)
        if not self._numbered:
            return frames
        return [marks["image_id_start_token"], *spell(str(grid.number)), marks["image_id_end_token"], *frames]

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": split_patches(made["pixel_values"]), "target_sizes": made["target_sizes"]}


_SIDES = (("start", ""), ("end", "/"))


class JoinedTileTokens(ImageTokens):
    """Image tokens of LLaVA-NeXT: placeholders without marks, whose number follows from the image's size."""

    taken: tuple[str, ...] = ("pixel_values", "image_sizes")

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        grids = context.fields.get("image_grid_pinpoints")
        found = [list(each) for each in getattr(self.processor, "image_grid_pinpoints", None) or ()]
        if grids is not None and found != [list(each) for each in grids]:
            raise UsageError(
                f"preprocessor_config.json: image_grid_pinpoints is {found}, but the model's in config.json is "
                f"{grids}; use the processor of this model"
            )

    def _computed(self, height: int, width: int) -> Grid:
        return Grid(1, self.context.tokens_of_size(height, width))

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return [self._computed(height, width) for height, width in made["image_sizes"].tolist()]


class LoneTileTokens(JoinedTileTokens):
    """Image tokens of LLaVA-OneVision, where only the image of a sequence with one is cut into tiles.

    Args:
        context: Image processor and model.
        together: Placeholders of an image next to others.
    """

    taken = (*JoinedTileTokens.taken, "batch_num_images")

    def __init__(self, context: MediaContext, together: int) -> None:
        super().__init__(context)
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
        require_unchanged(
            f"image {file.place}", grid, self._output_grids(made)[0] if copies == 1 else self._together
        )
        kept = {name: made[name][:1] for name in JoinedTileTokens.taken}
        return {**kept, self.taken[-1]: torch.tensor([copies])}


def joined_tiles(context: MediaContext) -> JoinedTileTokens:
    """Return the image tokens of tiles whose features are joined."""
    together = context.family.tokens_together
    return (
        JoinedTileTokens(context) if together is None else LoneTileTokens(context, together(context.config))
    )
