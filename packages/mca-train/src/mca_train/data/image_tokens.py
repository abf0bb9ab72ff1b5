"""Token counts and pixel tensors of images, from the image processor of the checkpoint.

Kinds of tokens are in `patch_grids`, `image_tiles` and `pooled_patches`; `image_processors` chooses one for a model.
`media_tokens` joins images and videos.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_models.media import ImageSpan
from mca_train.data.grids import Grid
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.image_files import ImageFile


class ImageTokens(ABC):
    """Image tokens of a model.

    Args:
        processor: Hugging Face image processor.
        token: Id of the placeholder token.
        options: Options of the processor for every image.
    """

    taken: tuple[str, ...] = ("pixel_values",)
    """Outputs of the processor that the vision tower needs."""

    def __init__(self, processor: ImageProcessor, token: int, **options: object) -> None:
        self.token = token
        self.before: Sequence[int] = ()
        """Tokens that chat templates write before a placeholder."""
        self.after: Sequence[int] = ()
        self.options = options
        self.processor = processor
        self._grid = lru_cache(maxsize=1 << 16)(self._computed)

    def grid(self, height: int, width: int) -> Grid:
        """Return rows and columns of placeholders of an image of ``height`` times ``width`` pixels.

        Raises:
            McaError: The processor does not support this size.
        """
        return self._grid(height, width)

    @abstractmethod
    def _computed(self, height: int, width: int) -> Grid: ...

    @abstractmethod
    def _made(self, made: dict[str, Tensor]) -> list[Grid]:
        """Return the grids of images from the processor's outputs."""

    def in_sequence(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return the grids of the media of one sequence, of which those of images may depend on each other."""
        return list(grids)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        return [self.token] * grid.tokens

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens directly before an image's first placeholder and after its last."""
        return self.before, self.after

    def mark(self, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Return the text of an image in plain text: a placeholder with the family's marks."""
        return "".join(tokenizer.convert_ids_to_tokens([*self.before, self.token, *self.after]))

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the locations of an image from the indices ``where`` of its placeholders."""
        return [ImageSpan(int(where[0]), grid.rows, grid.columns)]

    def tensors(self, files: "Sequence[ImageFile]", grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``files``, whose placeholders are ``grids``.

        Raises:
            McaError: A file cannot be read, or its size has changed since its placeholders were counted.
        """
        pixels = [file.pixels() for file in files]
        made = dict(self.processor(images=pixels, return_tensors="pt", **self.options).data)
        for file, grid, now in zip(files, grids, self._made(made), strict=True):
            require_unchanged(f"image {file.place}", grid, now)
        return self._taken(made)

    def _taken(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower from the processor's outputs."""
        return {name: made[name] for name in self.taken}


def locate_runs(where: Sequence[int]) -> list[ImageSpan]:
    """Return one location for each run of placeholders that follow one another, by their indices ``where``."""
    starts = [index for index, previous in zip(where, [-2, *where], strict=False) if index > previous + 1]
    ends = [index + 1 for index, later in zip(where, [*where[1:], -1], strict=True) if later != index + 1]
    return [ImageSpan(int(start), 1, int(end - start)) for start, end in zip(starts, ends, strict=True)]


def require_unchanged(place: str, grid: Grid, now: Grid) -> None:
    """Raise an error for a file whose number of tokens has changed.

    Raises:
        McaError: The grids differ.
    """
    if grid != now:
        raise McaError(
            f"{place} had {grid} tokens when rows were read, and has {now} now; do not change files during training, "
            "and empty tokenized_cache, which keeps sizes"
        )


def load_processor(
    directories: Sequence[Path], load: Callable[[Path], ImageProcessor], missing: str
) -> ImageProcessor:
    """Return the processor of media in the first of ``directories`` that has one; ``missing`` says that none has.

    Raises:
        UsageError: None has one that can be loaded.
    """
    reasons = []
    for directory in directories:
        try:
            return load(directory)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reasons.append(f"{directory}: {' '.join(str(error).split())[:200]}")
    raise UsageError(f"{missing}: {'; '.join(reasons)}")
