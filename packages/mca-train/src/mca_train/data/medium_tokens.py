"""Tokens of one medium of a model: its grid, and what images, videos and audio clips have in common.

Kinds of image tokens are in `patch_grids` and `image_tiles`; `media_tokens` chooses one for a model. `video_tokens`
and `audio_tokens` have the others, and `media_tokens` joins all media.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import ImageSpan, placeholders
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import VisionModel
from mca_train.data.message_parts import AUDIO, IMAGE, VIDEO
from mca_train.types import ImageProcessor, Upstream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.image_files import ImageFile

_AUDIO = -1
_LOADERS = {
    IMAGE: (
        "image_processing_auto",
        "AutoImageProcessor",
        "rows have images, and there is no image processor",
    ),
    VIDEO: (
        "video_processing_auto",
        "AutoVideoProcessor",
        "rows have videos, and there is no video processor",
    ),
    AUDIO: (
        "feature_extraction_auto",
        "AutoFeatureExtractor",
        "rows have audio, and there is no feature extractor",
    ),
}
"""Modules and classes of transformers that load the processor of a medium, and the error if none is there."""


@dataclass(frozen=True)
class Grid:
    """Tokens of one image, video or audio clip.

    Args:
        rows: Rows of placeholders, of a video in each frame; for tiles, the number of tiles.
        columns: Columns of placeholders; for tiles, the placeholders of each.
        frames: Frames of a video after patches are merged; 0: an image; -1: an audio clip.
        interval: Time positions from one frame of a video to the next.
        times: Seconds of the frames, which some families write in front of them; known while a row is read.
        tile_rows: Rows of the tiles of an image, for families with marks between tiles.
        tile_columns: Columns of its tiles; known while a row is read.
        tile_tokens: Placeholders of a tile next to a whole image of others; known while a row is read.
        sound: Placeholders of the sound of a video, between those of its frames.
        number: Number among the images of its sequence, its videos, or its clips.
    """

    rows: int
    columns: int
    frames: int = 0
    interval: float = 1.0
    times: tuple[float, ...] = field(default=(), compare=False)
    tile_rows: int = 1
    tile_columns: int = field(default=1, compare=False)
    tile_tokens: int = field(default=0, compare=False)
    sound: int = 0
    number: int = field(default=0, compare=False)

    @property
    def medium(self) -> str:
        """Return ``image``, ``video`` or ``audio``."""
        return {0: IMAGE, _AUDIO: AUDIO}.get(self.frames, VIDEO)

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return max(self.frames, 1) * self.rows * self.columns + self.sound

    @property
    def numbers(self) -> list[float]:
        """Return the numbers from which ``from_numbers`` restores the grid, without what only a row knows."""
        return [self.rows, self.columns, self.frames, self.interval, self.tile_rows, self.sound, self.number]

    @classmethod
    def audio(cls, tokens: int) -> "Grid":
        """Return the grid of an audio clip."""
        return cls(1, tokens, _AUDIO)

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Grid":
        """Return the grid with these ``numbers``."""
        rows, columns, frames, interval, *others = numbers
        tile_rows, sound, number = map(int, others)
        size = (int(rows), int(columns), int(frames), float(interval))
        return cls(*size, tile_rows=tile_rows, sound=sound, number=number)

    def __str__(self) -> str:
        sides = (self.frames, self.rows, self.columns) if self.frames > 0 else (self.rows, self.columns)
        return " x ".join(map(str, sides)) + (f" and {self.sound} of sound" if self.sound else "")


@dataclass(frozen=True)
class MediaContext:
    """Source of the tokens of a medium: its processor and the model.

    Args:
        processor: Hugging Face processor of images or videos, or feature extractor of audio.
        token: Id of the placeholder token.
        config: Model configuration.
        tokenizer: Tokenizer of the model.
    """

    processor: ImageProcessor
    token: int
    config: McaModelConfig
    tokenizer: "PreTrainedTokenizerBase"

    @property
    def fields(self) -> Values:
        """Keys of media in ``config.json``."""
        return self.config.vision_fields or {}

    @property
    def family(self) -> VisionModel:
        """Towers of the model's family."""
        part = get_family(self.config.model_type).vision
        assert part is not None, "a model with media has towers"
        return part

    @property
    def tokens_per_image(self) -> int:
        """Number of placeholders of an image or a tile, where all have the same."""
        assert self.family.tokens_per_image is not None, "images have a fixed number of tokens"
        return self.family.tokens_per_image(self.config)

    def tokens_of_size(self, height: int, width: int) -> int:
        """Return the number of placeholders of an image by its height and width, or its patches."""
        assert self.family.tokens_of_size is not None, "the size of an image gives its tokens"
        return self.family.tokens_of_size(self.config, height, width)

    def ids(self, *marks: str) -> list[int]:
        """Return the ids of special tokens.

        Raises:
            UsageError: The tokenizer lacks one.
        """
        known = self.tokenizer.get_vocab()
        if missing := [mark for mark in marks if mark not in known]:
            raise UsageError(
                f"the tokenizer has no token {', '.join(missing)} around images"
                "; set tokenizer_name_or_path to the model's own"
            )
        return [known[mark] for mark in marks]

    def named_ids(self, **marks: str) -> dict[str, int]:
        """Return the ids of special tokens that the tokenizer has as attributes, with their usual texts."""
        return dict(
            zip(marks, self.ids(*(getattr(self.tokenizer, *mark) for mark in marks.items())), strict=True)
        )

    def spell(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


class MediumTokens:
    """Tokens of one medium of a model.

    Args:
        context: Processor of the medium, and the model.
    """

    enclosing: tuple[Sequence[int], Sequence[int]] = (), ()
    """Tokens that the processor writes before and after the placeholders."""

    def __init__(self, context: MediaContext) -> None:
        self.context, self.token, self.processor = context, context.token, context.processor

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens that replace one placeholder of the chat template."""
        before, after = self.enclosing
        return [*before, *[self.token] * grid.tokens, *after]


class ImageTokens(MediumTokens, ABC):
    """Image tokens of a model."""

    taken: tuple[str, ...] = ("pixel_values",)
    """Outputs of the processor that the vision tower needs."""

    def __init__(self, context: MediaContext) -> None:
        super().__init__(context)
        self.before: Sequence[int] = ()
        """Tokens that chat templates write before a placeholder."""
        self.after: Sequence[int] = ()
        self.options: Values = {}
        """Options of the processor for every image, which the family's own processor passes too."""
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
    def _output_grids(self, made: Mapping[str, Tensor]) -> list[Grid]:
        """Return the grids of images from the processor's outputs."""

    def in_sequence(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return the grids of the media of one sequence, of which those of images may depend on each other."""
        return list(grids)

    def marks(self, grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens directly before an image's first placeholder and after its last."""
        ids = self.ids(grid)
        first, last = ids.index(self.token), ids[::-1].index(self.token)
        return [*self.before, *ids[:first]], [*ids[len(ids) - last :], *self.after]

    def mark(self) -> str:
        """Return the text of an image in plain text: a placeholder with the family's marks."""
        return "".join(self.context.tokenizer.convert_ids_to_tokens([*self.before, self.token, *self.after]))

    def locate(self, where: Sequence[int], grid: Grid) -> list[ImageSpan]:
        """Return the location of an image from the indices ``where`` of its placeholders, or of each of its parts."""
        if where[-1] - where[0] >= len(where):
            return locate_runs(where)
        return [ImageSpan(int(where[0]), grid.rows, grid.columns)]

    def tensors(self, files: "Sequence[ImageFile]", grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for ``files``, whose placeholders are ``grids``.

        Raises:
            McaError: A file cannot be read, or its size has changed since its placeholders were counted.
        """
        pixels = [file.pixels() for file in files]
        made = dict(self.processor(images=pixels, return_tensors="pt", **self.options).data)
        for file, grid, now in zip(files, grids, self._output_grids(made), strict=True):
            require_unchanged(f"image {file.place}", grid, now)
        return self._tower_inputs(made)

    def _tower_inputs(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def load_processor(directories: Sequence[Path], medium: str) -> ImageProcessor:
    """Return the processor of a medium in the first of ``directories`` that has one.

    Raises:
        UsageError: None has one that can be loaded.
    """
    module, name, missing = _LOADERS[medium]
    # without torchvision, transformers 5.17 exports a dummy class that raises an error
    loader = getattr(importlib.import_module(f"transformers.models.auto.{module}"), name)
    options = {"backend": "pil"} if medium == IMAGE else {}
    reasons = []
    for directory in directories:
        try:
            return loader.from_pretrained(directory, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reasons.append(f"{directory}: {' '.join(str(error).split())[:200]}")
    raise UsageError(f"{missing}: {'; '.join(reasons)}")


def require_placeholder(medium: str, config: McaModelConfig, fields: Values | None) -> int:
    """Return the placeholder of a medium from ``fields`` of ``config.json``.

    Raises:
        UsageError: There is none.
    """
    if (token := placeholders(fields).get(medium)) is None:
        raise UsageError(
            f"config.json: {medium}_token_id is missing, the placeholder of {config.model_type}"
            "; take the config.json that was published with the model"
        )
    return token


def config_ids(config: McaModelConfig, *keys: str) -> list[int]:
    """Return the ids of tokens that ``config.json`` names.

    Raises:
        UsageError: A key is missing.
    """
    fields = config.vision_fields or {}
    if missing := [key for key in keys if key not in fields]:
        raise UsageError(f"config.json: {' and '.join(missing)} of {config.model_type} is missing")
    return [int(fields[key]) for key in keys]


@contextmanager
def expecting(processor: ImageProcessor, family: str, expected: str, more: str = "") -> Iterator[Upstream]:
    """Context with the module of ``processor``, in which a missing attribute of either means another processor.

    Raises:
        UsageError: An attribute is missing; ``expected`` names the right processor, and ``more`` what else it needs.
    """
    try:
        yield sys.modules[type(processor).__module__]
    except AttributeError as error:
        raise UsageError(
            f"{type(processor).__name__}: this processor is not supported for {family}; expected {expected} in "
            f"preprocessor_config.json{more}"
        ) from error
