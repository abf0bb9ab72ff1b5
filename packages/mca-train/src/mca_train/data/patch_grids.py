"""Image tokens of grids of patches: rows and columns follow the image.

Qwen, GLM    a grid of patches, several of which are merged into one token
Kimi         the same grid, of an image that is padded at its ends
Mistral 3    rows of tokens, each ending with a mark
"""

import inspect
import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_models.media import ImageSpan
from mca_train.data.grids import Grid
from mca_train.data.image_tokens import ImageTokens
from mca_train.types import ImageProcessor


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


def limited_sides(processor: ImageProcessor, height: int, width: int) -> tuple[int, int]:
    """Return the sides in pixels of an image whose longest edge the processor limits."""
    longest = processor.size["longest_edge"]
    ratio = max(height / longest, width / longest, 1.0)
    sides = (height, width) if ratio == 1 else (int(height / ratio), int(width / ratio))
    if not min(sides):
        raise McaError(
            f"an image of {width} x {height} pixels cannot be used: it is too narrow"
            "; remove the row or crop the image"
        )
    return sides


class WholeLineTokens(ImageTokens):
    """Image tokens of LightOnOCR: merged patches, of which an image of an odd number of patches loses the last.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        patch: Side of a patch in pixels.
        merge: Patches along the side of a token.
    """

    taken = ("pixel_values", "image_sizes")

    def __init__(self, processor: ImageProcessor, token: int, patch: int, merge: int) -> None:
        super().__init__(processor, token)
        self._patch, self._merge = patch, merge

    def _computed(self, height: int, width: int) -> Grid:
        patches = [(side - 1) // self._patch + 1 for side in limited_sides(self.processor, height, width)]
        rows, columns = (count // self._merge for count in patches)
        if not min(rows, columns):
            raise McaError(
                f"an image of {width} x {height} pixels cannot be used: expected at least "
                f"{self._merge} patches of {self._patch} pixels in each direction; remove the row or enlarge the image"
            )
        return Grid(rows, columns)

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        side = self._patch * self._merge
        return [Grid(int(high) // side, int(wide) // side) for high, wide in made["image_sizes"].tolist()]


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
        sides = limited_sides(self.processor, height, width)
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
