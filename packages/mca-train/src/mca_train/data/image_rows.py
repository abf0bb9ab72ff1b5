"""Rows with images become rows with placeholders, and the images in their order.

What places for images a row's messages have is known in `image_placement`, how large images are in `image_files`, and how
many tokens that is in `image_tokens`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.config.columns import PairArguments
from mca_train.data.encoding import Encoded, RowEncoder, without_nulls
from mca_train.data.formats import Converted, converted, image_columns, other_columns
from mca_train.data.image_files import ImageFile, image_file
from mca_train.data.image_placement import Places, listed, require_as_many
from mca_train.data.image_processors import image_tokens, with_image_marks
from mca_train.data.image_tag import PLACE, ImageWords
from mca_train.data.image_tokens import Grid, ImageTokens
from mca_train.data.long_texts import Beginning
from mca_train.data.message_parts import IMAGE, kind_of
from mca_train.data.placeholders import require_words
from mca_train.data.row_formats import format_of
from mca_train.data.row_paths import RowPaths
from mca_train.types import Upstream

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Rows = TypeVar("Rows", "datasets.Dataset", "datasets.IterableDataset")


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """What is known of images before the first one is met.

    Args:
        config: The model.
        directories: Where its image processor may be.
        paths: The files that rows may open.
    """

    config: McaModelConfig
    directories: tuple[Path, ...]
    paths: RowPaths = field(default_factory=RowPaths)
    _made: list[ImageTokens] = field(default_factory=list)

    def tokens(self, tokenizer: "PreTrainedTokenizerBase") -> ImageTokens:
        """Made when the first image is met: rows without images need no processor."""
        if not self._made:
            self._made.append(image_tokens(self.config, self.directories, tokenizer))
        return self._made[0]


class ImageRows:
    """The rows of some files, of which some may have images.

    Args:
        names: Their columns.
        reader: Of images.
        arguments: Columns, and the format if it is named.
        tokenizer: The model's.
        key: The argument that named the files, for errors.
        texts: Rows are plain text.

    Attributes:
        names: The columns of the rows that are tokenized.
        arguments: The same for them.
        tokenizer: The one that tokenizes them.
        vision: What the model's configuration says of images; None: it sees none.
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
        self._converted: Converted | None = None
        self.tokenizer = with_image_marks(tokenizer, reader.config)
        self.vision = reader.config.vision
        self._columns = image_columns(self.vision, arguments)
        self._words = ImageWords(self.vision, arguments)
        self._has_warned_of_frames = False
        self.names = list(names)
        if texts:
            return
        pairs = isinstance(arguments, PairArguments)
        self._converted = converted(names, arguments, key, pairs=pairs)
        if self._converted is not None:
            self.names = list(self._converted.names)
        own = None if pairs else "messages" if self._converted else format_of(names, arguments, key)
        self.arguments = replace(arguments, data_format=own)

    @property
    def tokens(self) -> ImageTokens:
        """Of the model."""
        return self._reader.tokens(self.tokenizer)

    def files(self, row: Values, side: int = 0) -> list[ImageFile]:
        """The images of one of a row's sequences, in the order of their placeholders."""
        return self.text(row)[1] if self._texts else self._read(row)[1][side]

    def encoded(
        self, row: Values, encode: RowEncoder, row_place: str
    ) -> tuple[Sequence[Encoded], list[list[Grid]]]:
        """The sequences of a row with what stands for every placeholder in its place; the grids of each's images.

        Args:
            row: As it stands in the file.
            encode: Makes tokens of a row with the columns `names`, one placeholder for an image.
            row_place: The row's place, for warnings.
        """
        plain, files = self._read(row)
        if not any(files):
            sequences = encode(plain)
            for tokens, _ in sequences:
                require_words(tokens, self.vision)
            return sequences, [[] for _ in files]
        expanded = self.tokens.expanded
        grids = [[self.grid(file, row_place) for file in of_side] for of_side in files]
        sequences = encode(plain)
        for tokens, _ in sequences:
            require_words(tokens, self.vision, has_images=True)
        grids = [self._begun(tokens, own) for (tokens, _), own in zip(sequences, grids, strict=True)]
        return [expanded(*sequence, own) for sequence, own in zip(sequences, grids, strict=True)], grids

    def _begun(self, tokens: Sequence[int], grids: list[Grid]) -> list[Grid]:
        """The grids of images in what is tokenized of a sequence."""
        return grids[: tokens.count(self.tokens.token)] if isinstance(tokens, Beginning) else grids

    def has_images(self, row: Values) -> bool:
        """Whether a row says that it has images, of which nothing is read."""
        if any(listed(row.get(name)) for name in self._columns):
            return True
        turns = (turn for turns in row.values() if isinstance(turns, list) for turn in turns)
        contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return not self._texts and any(kind_of(part) == IMAGE for part in parts)

    def text(self, row: Values) -> tuple[object, list[ImageFile]]:
        """The text of a row of plain text, one placeholder for each ``<image>`` in it, and the images."""
        given = self._given(row)
        text = row.get(self.arguments.text_column)
        if not isinstance(text, str) or not given:
            require_as_many(0, len(given))
            return text, []
        require_as_many(text.count(PLACE), len(given))
        marked = text.replace(PLACE, self.tokens.mark(self.tokenizer))
        return marked, [image_file(each, self._reader.paths) for each in given]

    def grid(self, file: ImageFile, row_place: str) -> Grid:
        """Return the grid of an image, whose header is read; ``row_place`` is the place of its row, for warnings.

        Raises:
            McaError: It cannot be read, or the processor does not take it.
        """
        size = file.size(lambda: self._warn_of_frames(file, row_place))
        try:
            return self.tokens.grid(*size)
        except McaError as error:
            raise McaError(f"image {file.place}: {error}") from error

    def _warn_of_frames(self, file: ImageFile, row_place: str) -> None:
        if not self._has_warned_of_frames:
            logger.warning(
                "%s: image %s has several frames or pages, of which only the first is used; this is reported once",
                row_place,
                redacted(file.place),
            )
            self._has_warned_of_frames = True

    def _read(self, row: Values) -> tuple[Values, list[list[ImageFile]]]:
        """The row with places for images, and the images of each of its sequences."""
        given = self._given(row)
        plain = row if self._converted is None else self._converted.convert(row)
        prompt, repeated = self.arguments.prompt_column, self._repeated(plain)
        found: JsonObject = {}
        files = []

        def unmarked(words: str) -> None:
            self._words.meet(words, row.keys(), "a turn of the user")

        for columns in self._sides:
            places = Places(given, self._reader.paths, unmarked=unmarked)
            turns = {name: plain[name] for name in columns if isinstance(plain.get(name), list)}
            if repeated:
                del turns[prompt]
            read = {name: [places.turn(turn) for turn in some] for name, some in turns.items()}
            places.require_all(read)
            if repeated:
                read[prompt] = read[columns[-1]][:repeated]
            found |= read
            files.append(places.files)
        return ({**plain, **found} if any(files) else plain), files

    def _given(self, row: Values) -> list[object]:
        """The images of a row's column."""
        for name in other_columns(self.vision):
            if row.get(name):
                raise McaError(f"has {name}, which cannot be used; remove the row, or the column")
        found = {name: some for name in self._columns if (some := listed(row.get(name)))}
        if len(found) > 1:
            raise McaError(f"has images in {' and in '.join(found)}; set images_column to one of the two")
        return next(iter(found.values()), [])

    def _repeated(self, plain: Values) -> int:
        """How many turns of the prompt both conversations of a pair repeat; see `preferences.split_row`."""
        own = self.arguments
        if not isinstance(own, PairArguments):
            return 0
        names = (own.prompt_column, own.chosen_column, own.rejected_column)
        prompt, *answers = (turns if isinstance(turns := plain.get(name), list) else [] for name in names)
        asked = without_nulls(prompt)
        is_repeated = all(without_nulls(turns[: len(prompt)]) == asked for turns in answers)
        return len(prompt) if is_repeated else 0

    @property
    def _sides(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each sequence."""
        own = self.arguments
        if isinstance(own, PairArguments):
            return (own.prompt_column, own.chosen_column), (own.prompt_column, own.rejected_column)
        if own.data_format == "messages":
            return ((own.messages_column,),)
        return ((own.prompt_column, own.completion_column) if own.data_format == "prompt_completion" else (),)


def require_none(names: Sequence[str], arguments: DataArguments, told: str) -> None:
    """Refuses rows with a column of images, where these would be left out without a word.

    Raises:
        UsageError: There is one.
    """
    if arguments.images_column in names:
        raise UsageError(
            f"{told} takes no images, but the rows have the column {arguments.images_column}; remove it"
        )


def undecoded(rows: Rows) -> Rows:
    """``rows`` whose images, wherever they stand in a row, are bytes and paths instead of pixels."""
    for name, feature in (rows.features or {}).items():
        if (plain := _undecoded(feature)) != feature:
            rows = rows.cast_column(name, plain)
    return rows


def _undecoded(feature: Upstream) -> Upstream:
    """A feature of ``datasets`` with those of images in it replaced."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return feature
