"""`SampleImages` are the images among a sample's tokens: where they stand, and what the vision model takes of them.

Until somebody asks for that, no file is opened. `DatasetImages` has those of a dataset.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import Values
from mca_models.images import ImageSpan
from mca_train.data.image_rows import ImageRows
from mca_train.data.image_tokens import Grid

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class SampleImages:
    """The images of one sample.

    Args:
        places: Among its tokens, in order.
        tensors: Reads them.
    """

    places: tuple[ImageSpan, ...]
    tensors: Callable[[], Mapping[str, Tensor]]

    @property
    def tokens(self) -> int:
        """How many of the sample's tokens are images'."""
        return sum(place.tokens for place in self.places)


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """Which images each sample of a dataset has; plain arrays, which can be kept.

    Args:
        starts: Where the images of each sample begin, and the end of the last: ``[samples + 1]``.
        grids: Of all images, ``[images, 2]``.
        origins: The row of each image, and which of the row's images it is, ``[images, 2]``.
    """

    starts: NDArray[np.int64]
    grids: NDArray[np.int32]
    origins: NDArray[np.int64]

    @classmethod
    def from_samples(
        cls, samples: Iterable[tuple[Sequence[Grid], Sequence[tuple[int, int]]]]
    ) -> "ImageTable":
        """From the grids and the origins of each sample's images."""
        kept = list(samples)
        counts = [len(grids) for grids, _ in kept]
        return cls(
            starts=np.cumsum([0, *counts], dtype=np.int64),
            grids=np.array([grid for grids, _ in kept for grid in grids], np.int32).reshape(-1, 2),
            origins=np.array([origin for _, origins in kept for origin in origins], np.int64).reshape(-1, 2),
        )


@dataclass(frozen=True, kw_only=True)
class DatasetImages:
    """The images of a dataset, which stay where its rows say.

    Args:
        rows: Of the files.
        table: Which images each sample has.
        read: What a row means.
        key: The argument that named the files, for errors.
        sides: Samples that a row makes, which follow one another.
    """

    rows: "datasets.Dataset"
    table: ImageTable
    read: ImageRows
    key: str
    sides: int = 1

    def get(self, index: int, tokens: NDArray[np.int32]) -> SampleImages | None:
        """Those of the sample ``index``, which has these ``tokens``; None: it has none."""
        own = slice(int(self.table.starts[index]), int(self.table.starts[index + 1]))
        if own.start == own.stop:
            return None
        grids: list[Grid] = [(int(high), int(wide)) for high, wide in self.table.grids[own]]
        origins = self.table.origins[own].tolist()
        return SampleImages(
            locate_images(self.read, tokens, grids), lambda: self._tensors(index % self.sides, grids, origins)
        )

    def _tensors(
        self, side: int, grids: Sequence[Grid], origins: Sequence[tuple[int, int]]
    ) -> Mapping[str, Tensor]:
        numbers = list(dict.fromkeys(row for row, _ in origins))
        try:
            files = {row: self.read.files(self.rows[row], side) for row in numbers}
            return self.read.tokens.tensors([files[row][which] for row, which in origins], grids)
        except McaError as error:
            told = f"row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            raise McaError(f"{self.key}, {told}: {error}") from error


def locate_images(read: ImageRows, tokens: NDArray[np.int32], grids: Sequence[Grid]) -> tuple[ImageSpan, ...]:
    """Where the images with these ``grids`` are among ``tokens``."""
    where = np.flatnonzero(np.asarray(tokens) == read.tokens.token)
    return tuple(read.tokens.places(where.tolist(), grids))


def stream_images(
    read: ImageRows, row: Values, side: int, tokens: Sequence[int], grids: Sequence[Grid], told: str
) -> SampleImages | None:
    """Those of one sequence of a row that nobody keeps; None: the sequence ends within one.

    Args:
        read: What a row means.
        row: Of the stream.
        side: Which of its sequences.
        tokens: Of the sequence.
        grids: Its images, those that were cut off too.
        told: Where the row stands, for errors.
    """
    whole = complete_images(grids, list(tokens).count(read.tokens.token))
    if whole is None:
        return None

    def tensors() -> Mapping[str, Tensor]:
        try:
            return read.tokens.tensors(read.files(row, side)[: len(whole)], whole)
        except McaError as error:
            raise McaError(f"{told}: {error}") from error

    return SampleImages(locate_images(read, np.asarray(tokens, np.int32), whole), tensors)


def complete_images(grids: Sequence[Grid], count: int) -> list[Grid] | None:
    """The images that ``count`` placeholders, the first ones of a sequence, are of; None: one of them is cut."""
    kept = 0
    for number, (rows, columns) in enumerate(grids):
        if kept == count:
            return list(grids[:number])
        kept += rows * columns
    return list(grids) if kept == count else None
