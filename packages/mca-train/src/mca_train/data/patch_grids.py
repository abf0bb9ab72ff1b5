"""Image tokens of grids of patches: rows and columns follow the image.

Qwen, GLM    a grid of patches, several of which are merged into one token
Kimi         the same grid, of an image that is padded at its ends
Mistral 3    rows of tokens, each ending with a mark
LightOnOCR   rows of tokens, without marks
Gemma 4      patches in the image's own proportions, several of which are pooled into a token
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_train.data.medium_tokens import Grid, ImageTokens, MediaContext, config_ids, expecting
from mca_train.types import ImageProcessor

PATCHES, POSITIONS = "pixel_values", "image_position_ids"
"""Inputs of Gemma 4's vision tower: patches, and their columns and rows, which are -1 for padding."""


class _MergedPatches(ImageTokens):
    """Image tokens of which the processor returns rows and columns of patches."""

    taken = ("pixel_values", "image_grid_thw")

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        merge = self.processor.merge_size
        return [Grid(rows // merge, columns // merge) for _, rows, columns in made["image_grid_thw"].tolist()]


class PatchTokens(_MergedPatches):
    """Image tokens of Qwen and GLM."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        fields, self._sides = context.fields, resized_sides(context.processor)
        self.before, self.after = (
            [fields[key] for key in (f"vision_{side}_token_id", f"image_{side}_token_id") if key in fields]
            for side in ("start", "end")
        )

    def _computed(self, height: int, width: int) -> Grid:
        own = self.processor
        try:
            rows, columns = self._sides(height, width, own.temporal_patch_size)
            patches = own.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise unusable(height, width, error) from error
        if rows * columns * own.merge_size**2 != patches:
            raise McaError(
                f"{type(own).__name__} makes {patches} patches of {width} x {height} pixels, which are not "
                f"{rows} x {columns} tokens; report it"
            )
        return Grid(rows, columns)


class PaddedPatchTokens(_MergedPatches):
    """Image tokens of Kimi: a grid of patches of an image that is padded at its ends."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        begin, content, end = context.ids("<|media_begin|>", "<|media_content|>", "<|media_end|>")
        self.before, self.after = [begin, *context.spell("image"), content], [end]
        with expecting(self.processor, "Kimi", "Kimi_K25ImageProcessor") as source:
            self._resize: Callable[..., tuple[tuple[int, int], tuple[int, int]]] = source.navit_resize

    def _computed(self, height: int, width: int) -> Grid:
        own = self.processor
        largest = own.size["max_height"]
        _, (high, wide) = self._resize(
            height, width, own.patch_size, own.merge_size, own.max_patches, largest
        )
        side = own.patch_size * own.merge_size
        return Grid(high // side, wide // side)


def unusable(height: int, width: int, reason: object) -> McaError:
    """Return the error for an image of a size that the processor does not support."""
    return McaError(f"an image of {width} x {height} pixels cannot be used: {reason}")


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
    if (expanded := getattr(processor, "patch_expand_factor", None)) not in (None, 1):
        raise UsageError(
            f"{type(processor).__name__}: patch_expand_factor is {expanded}; expected 1, because transformers resizes "
            "images with PIL as if it were 1; set it to 1 in the processor's configuration"
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


class WholeLineTokens(ImageTokens):
    """Image tokens of LightOnOCR: merged patches, of which an image of an odd number of patches loses the last."""

    taken = ("pixel_values", "image_sizes")

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self._patch = context.fields["vision_config"].get("patch_size", 16)
        self._merge = context.fields.get("spatial_merge_size", 2)
        self._side = self._patch * self._merge

    def _computed(self, height: int, width: int) -> Grid:
        patches = [(side - 1) // self._patch + 1 for side in self._limited_sides(height, width)]
        rows, columns = (count // self._merge for count in patches)
        if not min(rows, columns):
            expected = f"at least {self._merge} patches of {self._patch} pixels in each direction"
            raise unusable(height, width, f"expected {expected}; remove the row or enlarge the image")
        return Grid(rows, columns)

    def _limited_sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides in pixels of an image whose longest edge the processor limits."""
        longest = self.processor.size["longest_edge"]
        ratio = max(height / longest, width / longest, 1.0)
        sides = (height, width) if ratio == 1 else (int(height / ratio), int(width / ratio))
        if not min(sides):
            raise unusable(height, width, "it is too narrow; remove the row or crop the image")
        return sides

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return [
            Grid(int(high) // self._side, int(wide) // self._side)
            for high, wide in made["image_sizes"].tolist()
        ]


class LineTokens(WholeLineTokens):
    """Image tokens of Mistral 3."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self.options = {"patch_size": {"height": self._side, "width": self._side}}
        self._row_end, self._last = context.ids("[IMG_BREAK]", "[IMG_END]")

    def _computed(self, height: int, width: int) -> Grid:
        high, wide = self._limited_sides(height, width)
        return Grid((high - 1) // self._side + 1, (wide - 1) // self._side + 1)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including the marks at the ends of rows."""
        ids = ([self.token] * grid.columns + [self._row_end]) * grid.rows
        return [*ids[:-1], self._last]


class PooledTokens(ImageTokens):
    """Image tokens of Gemma 4."""

    taken = (PATCHES, POSITIONS)

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        _require_window(context)
        self._sides = pooled_sides(context.processor)
        first, last = config_ids(context.config, *POOLED_MARKS)
        self.enclosing = [first], [last]

    def _computed(self, height: int, width: int) -> Grid:
        try:
            return Grid(*self._sides(height, width))
        except ValueError as error:
            raise unusable(height, width, error) from error

    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        return grids_of_positions(
            made[POSITIONS], [int(count) for count in made["num_soft_tokens_per_image"]]
        )

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return without_padding(made[PATCHES], made[POSITIONS])


def _require_window(context: MediaContext) -> None:
    """Raise an error for images that a sliding window cuts; in transformers their tokens see more than the window."""
    family, config, window = context.family, context.config, context.config.attention.window_size
    if family.windowed or not family.reach(config) or window is None:
        return
    if (most := getattr(context.processor, "max_soft_tokens", 0)) > window:
        raise UsageError(
            f"preprocessor_config.json: max_soft_tokens is {most}, more than the sliding window of {config.model_type} "
            f"({window} tokens); set it to a smaller one of 70, 140, 280, 560"
        )


POOLED_MARKS = ("boi_token_id", "eoi_token_id")
"""Keys of the tokens before and after an image of Gemma 4, or a frame."""


def pooled_sides(processor: ImageProcessor) -> Callable[[int, int], tuple[int, int]]:
    """Return the function from height and width to the rows and columns of tokens.

    Args:
        processor: Gemma 4's image or video processor.

    Raises:
        UsageError: It is another processor.
    """
    with expecting(processor, "Gemma 4", "its own", ", or in video_preprocessor_config.json") as source:
        resize, most = source.get_aspect_ratio_preserving_size, processor.max_soft_tokens
        patch, pool = processor.patch_size, processor.pooling_kernel_size
    options = {"patch_size": patch, "max_patches": most * pool**2, "pooling_kernel_size": pool}

    def sides(height: int, width: int) -> tuple[int, int]:
        high, wide = resize(height=height, width=width, **options)
        return high // (patch * pool), wide // (patch * pool)

    return sides


def without_padding(patches: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the tower without the padding that all images have in common."""
    most = int((positions >= 0).all(-1).sum(-1).max())
    return {PATCHES: patches[:, :most], POSITIONS: positions[:, :most]}


def grids_of_positions(positions: Tensor, tokens: Sequence[int]) -> list[Grid]:
    """Return the grids of images from the places of their patches, or of already merged ones."""
    found = []
    for (columns, rows), count in zip((positions.amax(1) + 1).tolist(), tokens, strict=True):
        pool = max(round((rows * columns / count) ** 0.5), 1)
        found.append(Grid(rows // pool, columns // pool))
    return found
