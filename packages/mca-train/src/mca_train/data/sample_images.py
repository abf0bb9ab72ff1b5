"""Images and videos of a sample: locations among its tokens, and inputs of the vision tower.

Files are opened only when the tensors are needed. `DatasetImages` holds the images of a dataset.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mca_config.types import Values
from mca_models.media import ImageSpan
from mca_train.data.image_rows import ImageRows
from mca_train.data.medium_tokens import Grid

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class SampleImages:
    """Images, videos and audio clips of one sample.

    Args:
        places: Locations among its tokens, in order; a video may have several.
        tensors: Function that reads the images.
    """

    places: tuple[ImageSpan, ...]
    tensors: Callable[[], Mapping[str, Tensor]]

    @property
    def tokens(self) -> int:
        """Number of placeholders in the sample."""
        return sum(place.tokens for place in self.places)


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """Table of each sample's images, as plain arrays that can be cached.

    Args:
        starts: Index of each sample's first image, and the total: ``[samples + 1]``.
        grids: Numbers of the grids of all images, videos and clips, ``[images, 7]``.
        origins: Row of each image, and its index in the row, ``[images, 2]``.
    """

    starts: NDArray[np.int64]
    grids: NDArray[np.float64]
    origins: NDArray[np.int64]

    @classmethod
    def from_samples(
        cls, samples: Iterable[tuple[Sequence[Grid], Sequence[tuple[int, int]]]]
    ) -> "ImageTable":
        """Build the table from the grids and the origins of each sample's images."""
        kept = list(samples)
        counts = [len(grids) for grids, _ in kept]
        return cls(
            starts=np.cumsum([0, *counts], dtype=np.int64),
            grids=np.array([grid.numbers for grids, _ in kept for grid in grids], np.float64).reshape(-1, 7),
            origins=np.array([origin for _, origins in kept for origin in origins], np.int64).reshape(-1, 2),
        )


@dataclass(frozen=True, kw_only=True)
class DatasetImages:
    """Images of a dataset, read on demand from its rows.

    Args:
        rows: Rows of the files.
        table: Table of each sample's images.
        read: Image options of the rows.
        key: Argument that names the files, for errors.
        sides: Number of consecutive samples per row.
    """

    rows: "datasets.Dataset"
    table: ImageTable
    read: ImageRows
    key: str
    sides: int = 1

    def get(self, index: int, tokens: NDArray[np.int32]) -> SampleImages | None:
        """Return the images of sample ``index`` with these ``tokens``; None: it has none."""
        own = slice(int(self.table.starts[index]), int(self.table.starts[index + 1]))
        if own.start == own.stop:
            return None
        grids = [Grid.from_numbers(numbers) for numbers in self.table.grids[own].tolist()]
        origins = self.table.origins[own].tolist()
        numbers = list(dict.fromkeys(row for row, _ in origins))

        def tensors() -> dict[str, Tensor]:
            rows = {row: self.rows[row] for row in numbers}
            location = f"{self.key}, row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            return self.read.tensors(rows, origins, grids, location, index % self.sides)

        return SampleImages(self.read.tokens.locate(tokens, grids), tensors)


def stream_images(
    read: ImageRows, row: Values, side: int, tokens: Sequence[int], grids: Sequence[Grid], location: str
) -> SampleImages | None:
    """Return the images of one sequence of a streamed row; None: the sequence ends within an image.

    Args:
        read: Image options of the rows.
        row: Row of the stream.
        side: Index of the sequence in the row.
        tokens: Tokens of the sequence.
        grids: Grids of its images, including truncated ones.
        location: Location of the row, for errors.
    """
    whole = complete_images(grids, len(read.tokens.where(tokens)))
    if whole is None:
        return None
    origins = [(0, which) for which in range(len(whole))]
    places = read.tokens.locate(tokens, whole)
    return SampleImages(places, lambda: read.tensors({0: row}, origins, whole, location, side))


def complete_images(grids: Sequence[Grid], count: int) -> list[Grid] | None:
    """Return the grids of the images that ``count`` placeholders cover; None: one image is incomplete."""
    kept = 0
    for number, grid in enumerate(grids):
        if kept == count:
            return list(grids[:number])
        kept += grid.tokens
    return list(grids) if kept == count else None
