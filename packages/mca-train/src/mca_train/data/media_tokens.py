"""Tokens of a model's images, videos and audio together: placeholders, locations and tensors in their order.

`medium_tokens` has those of one medium. `image_tokens` chooses the kind of image tokens of the model's family, with the
image processor of its checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_models.media import ImageSpan, placeholders
from mca_models.megatron.features.sequence_media import join_tensors
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import ImageTokenKind
from mca_train.config.arguments import DataArguments
from mca_train.data import image_tiles, patch_grids
from mca_train.data.audio_files import AudioFile
from mca_train.data.audio_tokens import AudioTokens, audio_tokens
from mca_train.data.chat import with_image_text
from mca_train.data.image_files import ImageFile
from mca_train.data.image_placement import MediaFile
from mca_train.data.medium_tokens import Grid, ImageTokens, MediaContext, load_processor, require_placeholder
from mca_train.data.message_parts import AUDIO, IMAGE, VIDEO
from mca_train.data.placeholders import VIDEO_TAG, media_fields
from mca_train.data.video_sound import SoundingVideoTokens, sounding_video_tokens
from mca_train.data.video_tokens import VideoTokens, frame_title

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First token of an image and one past its last, including its start and end marks."""

_KINDS: Mapping[ImageTokenKind, Callable[[MediaContext], ImageTokens]] = {
    "patches": patch_grids.PatchTokens,
    "padded_patches": patch_grids.PaddedPatchTokens,
    "tiles": image_tiles.TileTokens,
    "lines": patch_grids.LineTokens,
    "whole_lines": patch_grids.WholeLineTokens,
    "fixed": image_tiles.FixedTokens,
    "pooled": patch_grids.PooledTokens,
    "plain": image_tiles.PlainTokens,
    "enclosed": image_tiles.EnclosedTokens,
    "tile_rows": image_tiles.TileRowTokens,
    "tile_breaks": image_tiles.BreakTileTokens,
    "named_tiles": image_tiles.NamedTileTokens,
    "joined_tiles": image_tiles.joined_tiles,
    "row_column_tiles": image_tiles.RowColumnTokens,
    "thumbnail_tiles": image_tiles.ThumbnailTokens,
    "numbered_slices": image_tiles.SliceTokens,
    "word_marks": image_tiles.WordMarkTokens,
    "word_tiles": image_tiles.TileTokens,
}


def image_tokens(
    config: McaModelConfig, directories: Sequence[Path], tokenizer: "PreTrainedTokenizerBase"
) -> ImageTokens:
    """Return the image tokens of a model, whose image processor is in one of ``directories``.

    Raises:
        UsageError: The model does not support images, or there is no processor.
    """
    if config.vision_fields is None:
        raise UsageError(f"a {config.model_type} model does not support images; remove them from the rows")
    if (kind := _kind(config)) is None:
        raise UsageError(
            f"images of {config.model_type} are not supported in rows: mca does not write the tokens that its "
            "processor puts around an image; remove the images from the rows of the dataset"
        )
    processor = load_processor(directories, IMAGE)
    token = require_placeholder(IMAGE, config, config.vision_fields)
    return _KINDS[kind](MediaContext(processor, token, config, tokenizer))


def _kind(config: McaModelConfig) -> ImageTokenKind | None:
    """Return the image token kind of a model's family; None: not supported."""
    part = get_family(config.model_type).vision
    return part.image_tokens if part is not None else None


class MediaTokens:
    """Tokens of a model's media; each processor is loaded at the first file of its medium.

    Args:
        config: Model configuration.
        directories: Directories that may contain the processors.
        tokenizer: Tokenizer of the model.
        arguments: Options of the run for videos and audio.
    """

    def __init__(
        self,
        config: McaModelConfig,
        directories: Sequence[Path],
        tokenizer: "PreTrainedTokenizerBase",
        arguments: DataArguments,
    ) -> None:
        self._model, self._arguments = (config, directories, tokenizer), arguments
        self._placeholders = placeholders(media_fields(config, tokenizer))

    @cached_property
    def _images(self) -> ImageTokens:
        return image_tokens(*self._model)

    @cached_property
    def _videos(self) -> VideoTokens | SoundingVideoTokens:
        return sounding_video_tokens(*self._model, self._arguments)

    @cached_property
    def _audio(self) -> AudioTokens:
        return audio_tokens(*self._model, self._arguments)

    def _of(self, medium: str) -> ImageTokens | VideoTokens | SoundingVideoTokens | AudioTokens:
        if medium == AUDIO:
            return self._audio
        return self._images if medium == IMAGE else self._videos

    def grid(self, file: MediaFile, several: Callable[[], None]) -> Grid:
        """Return the grid of a medium from its header; ``several`` is called for an image with frames.

        Raises:
            McaError: The file cannot be read, or the processor does not support its size.
        """
        if isinstance(file, ImageFile):
            size, images = file.size(several), self._images
            with _naming(f"{IMAGE} {file.place}"):
                return images.grid(*size)
        if isinstance(file, AudioFile):
            audio, clip = self._audio, file.facts()
            with _naming(f"{AUDIO} {file.place}"):
                return audio.grid(clip)
        videos = self._videos
        facts = file.facts(sound=videos.uses_sound)
        with _naming(f"{VIDEO} {file.place}"):
            return videos.grid(facts)

    @property
    def list_fps(self) -> float:
        """Frames per second of a video that a row gives as a list of images."""
        return self._videos.list_fps

    def in_sequence(self, grids: Sequence[Grid]) -> list[Grid]:
        """Return the grids of the media of one sequence, with their numbers; each was found for its medium alone."""
        counts, numbered = Counter[str](), []
        for grid in grids:
            numbered.append(replace(grid, number=counts[grid.medium]))
            counts[grid.medium] += 1
        return self._images.in_sequence(numbered) if counts[IMAGE] else numbered

    def mark(self) -> str:
        """Return the text of an image in plain text: a placeholder with the family's marks."""
        return self._images.mark()

    def where(self, tokens: ArrayLike) -> list[int]:
        """Return the indices of all placeholders."""
        known = [*self._placeholders.values()]
        found: list[int] = np.flatnonzero(np.isin(np.asarray(tokens), known)).tolist()
        return found

    def _split(self, tokens: ArrayLike, grids: Sequence[Grid]) -> Iterator[tuple[Grid, list[int]]]:
        """Yield each grid with the indices of its placeholders in ``tokens``."""
        where = self.where(tokens)
        ends = np.cumsum([0, *(grid.tokens for grid in grids)]).tolist()
        for grid, (start, stop) in zip(grids, pairwise(ends), strict=True):
            yield grid, where[start:stop]

    def locate(self, tokens: ArrayLike, grids: Sequence[Grid]) -> tuple[ImageSpan, ...]:
        """Return the locations of the media with these ``grids`` in ``tokens``."""
        split = self._split(tokens, grids)
        return tuple(span for grid, where in split for span in self._of(grid.medium).locate(where, grid))

    def spans(self, tokens: ArrayLike, grids: Sequence[Grid]) -> list[Span]:
        """Return the spans of the images with these ``grids`` in ``tokens``, with their marks."""
        found, tokens = [], np.asarray(tokens)
        for grid, where in self._split(tokens, grids):
            start, stop = where[0], where[-1] + 1
            before, after = self._images.marks(grid)
            start -= len(before) * (tokens[max(start - len(before), 0) : start].tolist() == [*before])
            stop += len(after) * (tokens[stop : stop + len(after)].tolist() == [*after])
            found.append((start, stop))
        return found

    def expand(
        self, tokens: Sequence[int], targets: Sequence[bool], grids: Sequence[Grid]
    ) -> tuple[list[int], list[bool]]:
        """Replace each placeholder by the tokens of its medium; none of these is a target.

        Raises:
            McaError: The numbers or the order of placeholders and files differ.
        """
        media = {token: medium for medium, token in self._placeholders.items()}
        found = [media[token] for token in tokens if token in media]
        for medium, token in self._placeholders.items():
            wanted = sum(grid.medium == medium for grid in grids)
            if (count := found.count(medium)) != wanted:
                raise McaError(
                    f"the chat template makes {counted(count, 'placeholder')} (token {token}) of "
                    f"{counted(wanted, medium)}; use a template that writes one for each {medium}, and no text that "
                    "contains it"
                )
        if found != [grid.medium for grid in grids]:
            raise McaError(
                "the chat template changes the order of images, videos and audio; keep it in the template"
            )
        ids: list[int] = []
        is_target: list[bool] = []
        sizes = iter(grids)
        for token, target in zip(tokens, targets, strict=True):
            grid = next(sizes) if token in media else None
            spelled = [token] if grid is None else self._of(grid.medium).ids(grid)
            ids += spelled
            is_target += [target and grid is None] * len(spelled)
        return ids, is_target

    def tensors(self, files: Sequence[MediaFile], grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Return the inputs of the towers for ``files``, whose placeholders are ``grids``.

        Raises:
            McaError: A file cannot be read, or its size has changed since its placeholders were counted.
        """
        images = [file for file in files if isinstance(file, ImageFile)]
        if len(images) == len(files):
            return self._images.tensors(images, grids)
        return join_tensors([self._one(file, grid) for file, grid in zip(files, grids, strict=True)])

    def _one(self, file: MediaFile, grid: Grid) -> dict[str, Tensor]:
        if isinstance(file, ImageFile):
            return self._images.tensors([file], [grid])
        if isinstance(file, AudioFile):
            return self._audio.tensors(file, grid)
        return self._videos.tensors(file, grid)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Context that begins errors with ``place``."""
    try:
        yield
    except McaError as error:
        raise McaError(f"{place}: {error}") from error


def with_image_marks(
    tokenizer: "PreTrainedTokenizerBase", config: McaModelConfig
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer whose rendered chats have the processor's image text with one placeholder.

    Gemma's templates write only the start mark. The processor adds the rest to the rendered text, where line breaks
    merge with adjacent ones into one token. Llama 4's write the mark before the tile of the whole image, and those
    of Aya Vision, Ovis 2 and Qianfan-OCR another word than the placeholder. InternVL's processor writes a title
    before the first frame of a video.
    """
    kind, fields = _kind(config), config.vision_fields
    if kind in ("tile_rows", "named_tiles", "word_marks", "word_tiles") and fields is not None:
        placeholder = tokenizer.convert_ids_to_tokens(placeholders(fields)[IMAGE])
        return with_image_text(tokenizer, "<|image|>" if kind == "tile_rows" else "<image>", placeholder)
    part = get_family(config.model_type).vision
    if part is not None and part.video_tokens == "numbered":
        return with_image_text(tokenizer, VIDEO_TAG, frame_title(1) + VIDEO_TAG)
    if kind != "fixed" or fields is None:
        return tokenizer
    return with_image_text(tokenizer, *image_tiles.gemma_image_text(tokenizer, fields))
