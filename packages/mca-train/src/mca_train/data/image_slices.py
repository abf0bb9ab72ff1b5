"""Image tokens of MiniCPM-V: the whole image behind its number, and its slices, all in their own proportions."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mca_config.errors import UsageError
from mca_models.media import ImageSpan
from mca_models.megatron.features.media_features import split_patches
from mca_train.data.grids import Grid
from mca_train.data.image_tokens import ImageTokens, locate_runs
from mca_train.types import ImageProcessor

Write = Callable[[Grid], list[int]]
"""Function from the grid of an image, whose placeholders are ``columns``, to its tokens."""


class SliceTokens(ImageTokens):
    """Image tokens of MiniCPM-V.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        mode: The model's downsample_mode.
        features: Function from rows and columns of patches to the number of placeholders.
        write: Function from the grid of an image to its tokens.

    Raises:
        UsageError: The processor is not supported.
    """

    taken = ("pixel_values", "target_sizes")

    def __init__(
        self,
        processor: ImageProcessor,
        token: int,
        mode: str,
        features: Callable[[int, int], int],
        write: Write,
    ) -> None:
        super().__init__(processor, token, downsample_mode=mode)
        self._mode, self.features, self._write = mode, features, write
        if not hasattr(processor, "get_sliced_grid") or not processor.do_resize:
            raise UsageError(
                f"{type(processor).__name__}: this processor is not supported for MiniCPM-V; expected "
                "MiniCPMV4_6ImageProcessor in preprocessor_config.json, with do_resize true"
            )

    def _computed(self, height: int, width: int) -> Grid:
        own, size = self.processor, (height, width)
        slices = (
            own.get_sliced_grid(size, own.max_slice_nums, own.scale_resolution) if own.slice_mode else None
        )
        sizes = {"scale_resolution": own.scale_resolution, "patch_size": own.patch_size}
        sizes |= {"downsample_mode": self._mode}
        whole = own.find_best_resize(size, **sizes, allow_upscale=slices is None)
        if slices is None:
            return self.sliced(0, 0, [self._count_features(*whole)])
        rows, columns = slices
        high, wide = own.get_refine_size(size, slices, **sizes, allow_upscale=True)
        return self.sliced(
            rows, columns, [self._count_features(*whole), self._count_features(high // rows, wide // columns)]
        )

    def _count_features(self, height: int, width: int) -> int:
        return self.features(height // self.processor.patch_size, width // self.processor.patch_size)

    def _made(self, made: Mapping[str, Tensor]) -> list[Grid]:
        left = [self.features(high, wide) for high, wide in made["target_sizes"].tolist()]
        found = []
        for (rows, columns), number in zip(made["grids"], made["num_patches_per_image"], strict=True):
            found.append(self.sliced(int(rows), int(columns), left[:number]))
            left = left[number:]
        return found

    @staticmethod
    def sliced(rows: int, columns: int, features: Sequence[int]) -> Grid:
        """Return the grid of an image with these ``features`` of the whole and of a slice."""
        whole, piece = features[0], features[-1]
        return Grid(
            1, whole + rows * columns * piece, tile_rows=rows, tile_columns=columns, tile_tokens=piece
        )

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of an image, including its number and marks."""
        return self._write(grid)

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the number and the mark before an image, and the mark after it."""
        ids = self.ids(grid)
        return ids[: ids.index(self.token)], ids[-1:]

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return one location for the whole image and each slice."""
        return locate_runs(where)

    def _taken(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "pixel_values": split_patches(made["pixel_values"]),
            "target_sizes": made["target_sizes"],
        }
