"""Rows with images, videos and audio: their placeholders, and their files in order.

`image_placement` finds the placeholders in messages, `image_files`, `video_files` and `audio_files` read the headers,
and `media_tokens` counts tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data.encoding import Encoded, RowEncoder, without_nulls
from mca_train.data.formats import COLUMN_KEYS, RowConverter, columns_by_medium, detect_format, row_converter
from mca_train.data.image_files import open_image
from mca_train.data.image_placement import (
    MediaFile,
    MediaPlacer,
    as_media_list,
    open_media_file,
    require_equal_counts,
    typed_media,
)
from mca_train.data.long_texts import TokenPrefix
from mca_train.data.media_tokens import MediaTokens, with_image_marks
from mca_train.data.medium_tokens import Grid
from mca_train.data.message_parts import MEDIA, media_type
from mca_train.data.placeholders import IMAGE_TAG, MediaTagCheck, media_fields, require_no_placeholders
from mca_train.data.row_paths import RowPaths
from mca_train.types import Upstream

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Rows = TypeVar("Rows", "datasets.Dataset", "datasets.IterableDataset")
Name = TypeVar("Name")


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Lazily created image and video tokens of a model.

    Args:
        config: Model configuration.
        directories: Directories that may contain the image and video processors.
        paths: Files that rows may open.
    """

    config: McaModelConfig
    directories: tuple[Path, ...]
    paths: RowPaths = field(default_factory=RowPaths)
    _tokens: list[MediaTokens] = field(default_factory=list)

    def tokens(self, tokenizer: "PreTrainedTokenizerBase", arguments: DataArguments) -> MediaTokens:
        """Return the tokens of media, whose processors are loaded when a row needs them."""
        if not self._tokens:
            self._tokens.append(MediaTokens(self.config, self.directories, tokenizer, arguments))
        return self._tokens[0]


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """Tokenizer, arguments and image reader with which a kind of run makes samples of rows.

    Attributes:
        tokenizer: The model's.
        data: Columns, lengths and limits.
        key: The argument that named the files, for errors.
        images: Image reader of the model; None: no images.
    """

    tokenizer: "PreTrainedTokenizerBase"
    data: "DataArguments"
    key: str
    images: "ImageReader | None" = None

    @property
    def vision(self) -> "Values | None":
        """Return the vision part of the model's configuration; None: a text model."""
        return None if self.images is None else self.images.config.vision_fields

    def without_text_reader(self) -> "RowContext":
        """Return the context without the image reader of a text model."""
        return replace(self, images=None) if self.vision is None else self


class ImageRows:
    """Rows of files, some of which may have media.

    Args:
        names: Columns of the rows.
        reader: Image tokens of the model.
        arguments: Names of columns, and ``data_format``.
        tokenizer: Tokenizer of the model.
        key: Argument that names the files, for errors.
        texts: Rows are plain text.

    Attributes:
        names: Columns after conversion.
        arguments: Arguments after conversion.
        tokenizer: Tokenizer with image marks.
        vision: Vision configuration of the model; None: a text model.
    """

    def __init__(
        self,
        names: Sequence[str],
        reader: ImageReader,
        arguments: DataArguments,
        tokenizer: "PreTrainedTokenizerBase",
        key: str,
        *,
        texts: bool = False,
    ) -> None:
        self._reader, self._texts = reader, texts
        self.arguments = arguments
        self._converted: RowConverter | None = None
        self.tokenizer = with_image_marks(tokenizer, reader.config)
        self.vision = media_fields(reader.config, tokenizer)
        self._columns = columns_by_medium(self.vision, arguments)
        self._tag_check = MediaTagCheck(self.vision, arguments)
        self._has_warned_of_frames = False
        self.names = list(names)
        if texts:
            return
        pairs = isinstance(arguments, PairArguments)
        self._converted = row_converter(names, arguments, key, pairs=pairs)
        if self._converted is not None:
            self.names = list(self._converted.names)
        own = None if pairs else "messages" if self._converted else detect_format(names, arguments, key)
        self.arguments = replace(arguments, data_format=own)

    @property
    def tokens(self) -> MediaTokens:
        """Tokens of the model's media."""
        return self._reader.tokens(self.tokenizer, self.arguments)

    def files(self, row: Values, side: int = 0) -> list[MediaFile]:
        """Return the images and videos of one sequence of a row, in the order of their placeholders."""
        return self.text(row)[1] if self._texts else self._read_images(row)[1][side]

    def tensors(
        self,
        rows: Mapping[Name, Values],
        origins: Sequence[tuple[Name, int]],
        grids: Sequence[Grid],
        location: str,
        side: int = 0,
    ) -> dict[str, Tensor]:
        """Return the inputs of the towers for media of several rows.

        Args:
            rows: Rows by any name.
            origins: Name of the row of each medium, and its index in the row.
            grids: Grids of the media.
            location: Location of the rows, for errors.
            side: Index of the sequence in its row.

        Raises:
            McaError: A file cannot be read, or has changed.
        """
        try:
            files = {name: self.files(row, side) for name, row in rows.items()}
            return self.tokens.tensors([files[name][which] for name, which in origins], grids)
        except McaError as error:
            raise McaError(f"{location}: {error}") from error

    def encode_row(
        self, row: Values, encode: RowEncoder, row_place: str
    ) -> tuple[Sequence[Encoded], list[list[Grid]]]:
        """Return the sequences of a row with expanded placeholders, and the grids of each sequence.

        Args:
            row: Row of the file.
            encode: Encoder of converted rows, with one placeholder per image or video.
            row_place: Location of the row, for warnings.
        """
        plain, files = self._read_images(row)
        if not any(files):
            sequences = encode(plain)
            for tokens, _ in sequences:
                require_no_placeholders(tokens, self.vision)
            return sequences, [[] for _ in files]
        expand = self.tokens.expand
        grids = [self.grids(of_side, row_place) for of_side in files]
        sequences = encode(plain)
        for tokens, _ in sequences:
            require_no_placeholders(tokens, self.vision, media={grid.medium for own in grids for grid in own})
        grids = [self._encoded_grids(tokens, own) for (tokens, _), own in zip(sequences, grids, strict=True)]
        return [expand(*sequence, own) for sequence, own in zip(sequences, grids, strict=True)], grids

    def _encoded_grids(self, tokens: Sequence[int], grids: list[Grid]) -> list[Grid]:
        """Return the grids of media within the tokenized part of a sequence."""
        return grids[: len(self.tokens.where(tokens))] if isinstance(tokens, TokenPrefix) else grids

    def has_images(self, row: Values) -> bool:
        """Return True if a row has images or videos, without reading them."""
        if any(as_media_list(row.get(name)) for names in self._columns.values() for name in names):
            return True
        turns = (turn for turns in row.values() if isinstance(turns, list) for turn in turns)
        contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return not self._texts and any(media_type(part) in MEDIA for part in parts)

    def text(self, row: Values) -> tuple[object, list[MediaFile]]:
        """Return the text with one placeholder per ``<image>``, and the images of a plain-text row."""
        column_images, *others = (self._column_files(row, medium) for medium in MEDIA)
        for medium, found in zip(MEDIA[1:], others, strict=True):
            if found:
                raise McaError(
                    f"has {medium}s, which mca-train pretrain does not support; remove the row, or the column"
                )
        text = row.get(self.arguments.text_column)
        if not isinstance(text, str) or not column_images:
            require_equal_counts(0, len(column_images))
            return text, []
        require_equal_counts(text.count(IMAGE_TAG), len(column_images))
        marked = text.replace(IMAGE_TAG, self.tokens.mark())
        return marked, [open_image(each, self._reader.paths) for each in column_images]

    def grids(self, files: Sequence[MediaFile], row_place: str) -> list[Grid]:
        """Return the grids of the media of a sequence from their headers; ``row_place`` locates the row in warnings.

        Raises:
            McaError: The file cannot be read, or the processor does not support its size.
        """
        return self.tokens.in_sequence(
            [self.tokens.grid(file, partial(self._warn_several_frames, file, row_place)) for file in files]
        )

    def _warn_several_frames(self, file: MediaFile, row_place: str) -> None:
        if not self._has_warned_of_frames:
            logger.warning(
                "%s: image %s has several frames or pages, of which only the first is used; this is reported once",
                row_place,
                redacted(file.place),
            )
            self._has_warned_of_frames = True

    def _read_images(self, row: Values) -> tuple[Values, list[list[MediaFile]]]:
        """Return the row with placeholders, and the images and videos of each of its sequences."""
        of_columns = {medium: self._column_files(row, medium) for medium in MEDIA}
        plain = row if self._converted is None else self._converted.convert(row)
        prompt, repeated = self.arguments.prompt_column, self._num_repeated_turns(plain)
        found: JsonObject = {}
        files = []

        def on_plain_tag(words: str) -> None:
            self._tag_check.check(words, row.keys(), "a turn of the user")

        def open_file(medium: str, value: object) -> MediaFile:
            return open_media_file(medium, value, self._reader.paths, lambda: self.tokens.list_fps)

        for columns in self._sequence_columns:
            turns = {name: plain[name] for name in columns if isinstance(plain.get(name), list)}
            typed = typed_media(turn for some in turns.values() for turn in some)
            places = MediaPlacer(of_columns, open_file, on_plain_tag=on_plain_tag, typed=typed)
            if repeated:
                del turns[prompt]
            read = {name: [places.turn(turn) for turn in some] for name, some in turns.items()}
            places.require_all(read)
            if repeated:
                read[prompt] = read[columns[-1]][:repeated]
            found |= read
            files.append(places.files)
        return ({**plain, **found} if any(files) else plain), files

    def _column_files(self, row: Values, medium: str) -> list[object]:
        found = {name: some for name in self._columns[medium] if (some := as_media_list(row.get(name)))}
        if len(found) > 1:
            raise McaError(
                f"has {medium}s in {' and in '.join(found)}; set {medium}s_column to one of the two"
            )
        return next(iter(found.values()), [])

    def _num_repeated_turns(self, plain: Values) -> int:
        """Return the number of prompt turns that both conversations of a pair repeat; see `encoding.split_row`."""
        own = self.arguments
        if not isinstance(own, PairArguments):
            return 0
        names = (own.prompt_column, own.chosen_column, own.rejected_column)
        prompt, *answers = (turns if isinstance(turns := plain.get(name), list) else [] for name in names)
        prompt_turns = without_nulls(prompt)
        is_repeated = all(without_nulls(turns[: len(prompt)]) == prompt_turns for turns in answers)
        return len(prompt) if is_repeated else 0

    @property
    def _sequence_columns(self) -> tuple[tuple[str, ...], ...]:
        own = self.arguments
        if isinstance(own, PairArguments):
            return (own.prompt_column, own.chosen_column), (own.prompt_column, own.rejected_column)
        if own.data_format == "messages":
            return ((own.messages_column,),)
        return ((own.prompt_column, own.completion_column) if own.data_format == "prompt_completion" else (),)


def reject_images(names: Sequence[str], arguments: DataArguments, task: str) -> None:
    """Raise an error for rows with a column of media, which would be ignored silently.

    Raises:
        UsageError: There is such a column.
    """
    for medium, key in COLUMN_KEYS.items():
        if (column := getattr(arguments, key)) in names:
            raise UsageError(
                f"{task} does not support {medium}s, but the rows have the column {column}; remove it"
            )


def without_decoding(rows: Rows) -> Rows:
    """Return ``rows`` with media as bytes and paths instead of decoded values."""
    for name, feature in (rows.features or {}).items():
        if (plain := _without_decoding(feature)) != feature:
            rows = rows.cast_column(name, plain)
    return rows


def _without_decoding(feature: Upstream) -> Upstream:
    """Replace the image features within a feature of ``datasets``."""
    import datasets

    for decoded in (datasets.Image, datasets.Audio, getattr(datasets, "Video", ())):
        if decoded and isinstance(feature, decoded):
            return decoded(decode=False)
    if isinstance(feature, dict):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_without_decoding(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_without_decoding(feature.feature))
    return feature
