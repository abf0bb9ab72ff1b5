"""Rows with images become rows with placeholders, and the images in their order.

    messages with parts    {"type": "image", "image" | "path" | "url" | "base64" | "bytes": ...}, {"type": "image_url"}
    a column of images     for each {"type": "image"} without more, or each <image> in the text of a turn; if the
                           messages have no place for any, they stand before the first words of the user

`image_files` knows how large images are, `image_tokens` how many tokens that is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.config.columns import PairArguments
from mca_train.data.encoding import Encoded, RowEncoder
from mca_train.data.formats import converted
from mca_train.data.image_files import ImageFile, image_file
from mca_train.data.image_kinds import image_tokens, with_image_marks
from mca_train.data.image_tokens import Grid, ImageTokens
from mca_train.data.message_parts import IMAGES, has_data, require_text_or_image

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

Rows = TypeVar("Rows", "datasets.Dataset", "datasets.IterableDataset")
PLACE = "<image>"
_OTHER_COLUMNS = ("videos", "audios")


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """What is known of images before the first one is met.

    Args:
        config: The model.
        directories: Where its image processor may be.
        folder: What relative paths start from; None: there is no one folder.
    """

    config: McaModelConfig
    directories: tuple[Path, ...]
    folder: Path | None = None
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
        texts: Rows are plain text.

    Attributes:
        names: The columns of the rows that are tokenized.
        arguments: The same for them.
        tokenizer: The one that tokenizes them.
    """

    def __init__(
        self,
        names: Sequence[str],
        reader: ImageReader,
        arguments: DataArguments,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        texts: bool = False,
    ) -> None:
        self._reader, self._texts = reader, texts
        self.arguments = arguments
        self.tokenizer = with_image_marks(tokenizer, reader.config)
        self._column = arguments.images_column if arguments.images_column in names else None
        self._others = [name for name in _OTHER_COLUMNS if name in names]
        self._converted = converted(names, arguments, pairs=isinstance(arguments, PairArguments))
        self.names = list(names)
        if self._converted is not None:
            self.names, self.arguments = list(self._converted.names), replace(arguments, data_format=None)

    @property
    def tokens(self) -> ImageTokens:
        """Of the model."""
        return self._reader.tokens(self.tokenizer)

    def files(self, row: Values, side: int = 0) -> list[ImageFile]:
        """The images of one of a row's sequences, in the order of their placeholders."""
        return self.text(row)[1] if self._texts else self._read(row)[1][side]

    def encoded(self, row: Values, encode: RowEncoder) -> tuple[Sequence[Encoded], list[list[Grid]]]:
        """The sequences of a row with what stands for every placeholder in its place; the grids of each's images.

        Args:
            row: As it stands in the file.
            encode: Makes tokens of a row with the columns `names`, one placeholder for an image.
        """
        plain, files = self._read(row)
        if not any(files):
            return encode(plain), [[] for _ in files]
        expanded = self.tokens.expanded
        grids = [[self.grid(file) for file in of_side] for of_side in files]
        sequences = encode(plain)
        grids = [self._begun(tokens, own) for (tokens, _), own in zip(sequences, grids, strict=True)]
        return [expanded(*sequence, own) for sequence, own in zip(sequences, grids, strict=True)], grids

    def _begun(self, tokens: Sequence[int], grids: list[Grid]) -> list[Grid]:
        """The grids of images in what is kept of a sequence: of a far longer text only the beginning is tokenized."""
        is_cut = len(tokens) > self.arguments.seq_length
        return grids[: tokens.count(self.tokens.token)] if is_cut else grids

    def text(self, row: Values) -> tuple[object, list[ImageFile]]:
        """The text of a row of plain text, one placeholder for each ``<image>`` in it, and the images."""
        self._require_no_others(row)
        given = _listed(row.get(self._column)) if self._column is not None else []
        text = row.get(self.arguments.text_column)
        places = text.count(PLACE) if isinstance(text, str) and self._column is not None else 0
        _require_as_many(places, len(given))
        if not isinstance(text, str) or not given:
            return text, []
        marked = text.replace(PLACE, self.tokens.mark(self.tokenizer))
        return marked, [image_file(each, self._reader.folder) for each in given]

    def grid(self, file: ImageFile) -> Grid:
        """Of an image, whose header is read.

        Raises:
            McaError: It cannot be read, or the processor does not take it.
        """
        try:
            return self.tokens.grid(*file.size())
        except McaError as error:
            told = str(error)
            raise McaError(told if file.place in told else f"image {file.place}: {told}") from error

    def _read(self, row: Values) -> tuple[Values, list[list[ImageFile]]]:
        """The row with places for images, and the images of each of its sequences."""
        self._require_no_others(row)
        given = _listed(row.get(self._column)) if self._column is not None else []
        plain = row if self._converted is None else self._converted.convert(row)
        found: JsonObject = {}
        files = []
        for columns in self._sides:
            places = _Places(given, self._reader.folder, marked=self._column is not None)
            turns = {name: plain[name] for name in columns if isinstance(plain.get(name), list)}
            read = {name: [places.turn(turn) for turn in some] for name, some in turns.items()}
            places.require_all(read)
            found |= read
            files.append(places.files)
        return ({**plain, **found} if any(files) else plain), files

    def _require_no_others(self, row: Values) -> None:
        for name in self._others:
            if row.get(name):
                raise McaError(f"has {name}, which cannot be used; remove the row")

    @property
    def _sides(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each sequence."""
        own = self.arguments
        if isinstance(own, PairArguments):
            return (own.prompt_column, own.chosen_column), (own.prompt_column, own.rejected_column)
        return ((own.messages_column, own.prompt_column, own.completion_column),)


def _listed(given: object) -> list[object]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


class _Places:
    """Takes the images of a row as its messages ask for them.

    Args:
        given: The images of the row's column.
        folder: What relative paths start from.
        marked: Whether ``<image>`` in a text is a place for one.
    """

    def __init__(self, given: Sequence[object], folder: Path | None, *, marked: bool) -> None:
        self._given, self._folder, self._marked = list(given), folder, marked
        self._next = self._asked = 0
        self.files: list[ImageFile] = []

    def turn(self, turn: object) -> object:
        """A turn whose images are parts without data; others stay."""
        if not isinstance(turn, dict):
            return turn
        content = turn.get("content")
        if isinstance(content, str) and self._marked and PLACE in content:
            return {**turn, "content": list(self._of_text(content))}
        if isinstance(content, list):
            return {**turn, "content": [self._part(part) for part in content]}
        return turn

    def _of_text(self, text: str) -> Iterator[JsonObject]:
        for number, piece in enumerate(text.split(PLACE)):
            if number:
                self._take()
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}

    def _part(self, part: object) -> object:
        require_text_or_image(part)
        if not isinstance(part, dict) or part.get("type") not in IMAGES:
            return part
        if has_data(part):
            self._asked += 1
            self.files.append(image_file({**part, "type": None}, self._folder))
        else:
            self._take()
        return {"type": "image"}

    def _take(self) -> None:
        self._asked += 1
        if self._next < len(self._given):
            self.files.append(image_file(self._given[self._next], self._folder))
        self._next += 1

    def require_all(self, columns: JsonObject) -> None:
        """Has all images in their places.

        Raises:
            McaError: There are more images than places, or fewer.
        """
        if self._given and not self._asked and (turn := _first_words(columns)) is not None:
            content = turn["content"]
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            turn["content"] = [*({"type": "image"} for _ in self._given), *words]
            for _ in self._given:
                self._take()
        _require_as_many(self._next, len(self._given))


def _require_as_many(places: int, images: int) -> None:
    if places != images:
        raise McaError(
            f"{places} places for images ({PLACE}, or parts of type image) but {images} images; "
            "their numbers must be equal"
        )


def _first_words(columns: JsonObject) -> JsonObject | None:
    """The first turn of a user; it may be changed."""
    for turns in columns.values():
        for number, turn in enumerate(turns):
            if isinstance(turn, dict) and turn.get("role") == "user":
                words: JsonObject = dict(turn)
                turns[number] = words
                return words
    return None


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
    """``rows`` of which columns of images give bytes and paths instead of pixels."""
    import datasets

    for name, feature in (rows.features or {}).items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(name, type(feature)(datasets.Image(decode=False)))
    return rows
