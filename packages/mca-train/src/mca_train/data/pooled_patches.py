"""Image tokens of Gemma 4: patches in the image's own proportions, several of which are pooled into a token."""

import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_train.data.grids import Grid
from mca_train.data.image_tokens import ImageTokens
from mca_train.types import ImageProcessor

PATCHES, POSITIONS = "pixel_values", "image_position_ids"
"""Inputs of the vision tower: patches, and their columns and rows, which are -1 for padding."""


def pooled_sides(processor: ImageProcessor) -> Callable[[int, int], tuple[int, int]]:
    """Return the function from height and width to the rows and columns of tokens.

    Args:
        processor: Gemma 4's image or video processor.

    Raises:
        UsageError: It is another processor.
    """
    resize = getattr(sys.modules[type(processor).__module__], "get_aspect_ratio_preserving_size", None)
    if resize is None or not hasattr(processor, "max_soft_tokens"):
        raise UsageError(
            f"{type(processor).__name__}: this processor is not supported for Gemma 4; expected its own in "
            "preprocessor_config.json, or in video_preprocessor_config.json"
        )

    def sides(height: int, width: int) -> tuple[int, int]:
        patch, pool = processor.patch_size, processor.pooling_kernel_size
        high, wide = resize(
            height=height,
            width=width,
            patch_size=patch,
            max_patches=processor.max_soft_tokens * pool**2,
            pooling_kernel_size=pool,
        )
        return high // (patch * pool), wide // (patch * pool)

    return sides


def without_padding(patches: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the tower without the padding that all images have in common."""
    most = int((positions >= 0).all(-1).sum(-1).max())
    return {PATCHES: patches[:, :most], POSITIONS: positions[:, :most]}


def grids_of_positions(positions: Tensor, tokens: Sequence[int]) -> list[Grid]:
    """Return the grids of images from the places of their patches, or of already merged ones."""
    found = []
    for sides, count in zip((positions.amax(1) + 1).tolist(), tokens, strict=True):
        columns, rows = sides
        pool = max(round((rows * columns / count) ** 0.5), 1)
        found.append(Grid(rows // pool, columns // pool))
    return found


class PooledTokens(ImageTokens):
    """Image tokens of Gemma 4.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        marks: Ids of the tokens before and after the placeholders of an image.
    """

    taken = (PATCHES, POSITIONS)

    def __init__(self, processor: ImageProcessor, token: int, marks: tuple[int, int]) -> None:
        super().__init__(processor, token)
        self._sides, self._marks = pooled_sides(processor), marks

    def _computed(self, height: int, width: int) -> Grid:
        try:
            return Grid(*self._sides(height, width))
        except ValueError as error:
            raise McaError(f"an image of {width} x {height} pixels cannot be used: {error}") from error

    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        return grids_of_positions(
            made[POSITIONS], [int(count) for count in made["num_soft_tokens_per_image"]]
        )

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the marks around an image."""
        return self._marks[:1], self._marks[1:]

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its marks."""
        return [self._marks[0], *super().ids(grid), self._marks[1]]

    def _taken(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return without_padding(made[PATCHES], made[POSITIONS])
