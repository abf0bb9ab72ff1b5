"""Encoding of rows with answers, and samples in memory, also for pre-training.

`streams` makes samples of the same rows on the fly. `encoding` tokenizes single rows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import Encoded, RowEncoder, RowNumbers, block_tokenizer
from mca_train.data.formats import media_columns
from mca_train.data.image_rows import ImageRows, without_decoding
from mca_train.data.medium_tokens import Grid
from mca_train.data.sample_images import DatasetImages, ImageTable, complete_images
from mca_train.data.token_dataset import TokenDataset
from mca_train.data.tools import null_filter

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def map_in_memory(
    rows: "datasets.Dataset",
    function: Callable[..., JsonObject],
    features: JsonObject,
    workers: int | None,
    batched: bool = False,
) -> "datasets.Dataset":
    """Map ``function`` over rows or batches with their indices; return the columns ``features``.

    The result has a random fingerprint. `datasets` would compute one by pickling ``function`` with all its references,
    such as the tokenizer, which takes half a second or more for a cache that is not used here.
    """
    import datasets
    from datasets.fingerprint import generate_random_fingerprint

    return rows.map(
        function,
        batched=batched,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=workers,
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint=generate_random_fingerprint(),
        features=datasets.Features(features),
    )


def lists(kind: str, depth: int) -> "datasets.Sequence":
    """Return the feature of lists of values in ``depth`` levels."""
    import datasets

    return datasets.Sequence(lists(kind, depth - 1) if depth > 1 else datasets.Value(kind))


def pretrain_blocks(
    rows: "datasets.Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    key: str,
    vision: Values | None = None,
) -> TokenDataset:
    """Concatenate all texts, each with EOS, and split them into blocks of ``seq_length`` tokens.

    Rows without text are counted. For the arguments see `block_tokenizer`.
    """
    names = rows.column_names
    tokenize = block_tokenizer(names, tokenizer, arguments, key, vision)
    column = arguments.text_column
    looked_at = [name for name in (column, *media_columns(vision, arguments)) if name in names]

    def tokenize_batch(batch: Mapping[str, Sequence[object]], indices: Sequence[int]) -> JsonObject:
        places = [f"row {index}" for index in indices]
        values = zip(*(batch[name] for name in looked_at), strict=True)
        return {"input_ids": tokenize([dict(zip(looked_at, row, strict=True)) for row in values], places)}

    workers, features = arguments.preprocessing_num_workers, {"input_ids": lists("int32", 1)}
    tokenized = map_in_memory(without_decoding(rows), tokenize_batch, features, workers, batched=True)
    if empty := len(rows) - len(tokenized):
        message = f"{key}: {empty} of {len(rows)} rows have no text in column '{column}'"
        if empty == len(rows):
            raise McaError(f"{message}; set text_column")
        logger.warning("%s and are left out", message)
    blocks = TokenDataset.in_blocks(_flatten(tokenized), arguments.seq_length)
    if not len(blocks):
        raise McaError(f"{key}: the texts have fewer than two tokens together; set a file with longer texts")
    return blocks


def _flatten(tokenized: "datasets.Dataset") -> NDArray[np.int32]:
    """Return column ``input_ids`` as one array, without Python lists."""
    chunks = tokenized.data.column("input_ids").chunks
    parts = [chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int32) for chunk in chunks]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@dataclass(frozen=True)
class EncodedRow:
    """Tokens of one row.

    Args:
        sequences: Tokens and targets of each sequence, truncated.
        is_cut: True if a sequence was truncated.
        grids: Media of each sequence; empty: the rows have none.
        numbers: Values of the sequences, such as a class.
    """

    sequences: list[Encoded]
    is_cut: bool
    grids: list[list[Grid]]
    numbers: list[float]


@dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """Encoding of rows with answers, for samples in memory and for streams.

    Args:
        encode: Encoder of a row.
        length: Maximum tokens of a sequence; longer ones are truncated.
        key: Argument that names the files, for errors.
        wanted: Description of what rows without a target lack.
        numbers: Function from a row to the numbers of its sequences; None: there are none.
        images: Image options of the rows; None: there are no images.
        whole: Sequences must fit: those of a row with a longer one have no target, instead of being truncated.
    """

    encode: RowEncoder
    length: int
    key: str
    wanted: str
    numbers: RowNumbers | None = None
    images: ImageRows | None = None
    whole: bool = False

    def encode_row(self, row: Values, place: str) -> EncodedRow:
        """Return the tokens of ``row``; ``place`` locates it in warnings.

        Raises:
            McaError: The row is invalid.
        """
        grids: list[list[Grid]] = []
        if self.images is None:
            encoded = self.encode(row)
        else:
            encoded, grids = self.images.encode_row(row, self.encode, place)
        is_cut = any(len(tokens) > self.length for tokens, _ in encoded)
        if is_cut and self.whole:
            encoded = [(tokens, [False] * len(tokens)) for tokens, _ in encoded]
        return EncodedRow(
            sequences=[(tokens[: self.length], targets[: self.length]) for tokens, targets in encoded],
            is_cut=is_cut and not self.whole,
            grids=grids,
            numbers=[] if self.numbers is None else [float(number) for number in self.numbers(row)],
        )


def answer_sequences(rows: "datasets.Dataset", answers: AnswerRows, workers: int | None) -> TokenDataset:
    """Tokenize the sequences of each row. Rows with a sequence without a target are dropped and counted.

    Args:
        rows: Rows of the files.
        answers: Encoding of a row.
        workers: Processes that tokenize; None: one.

    Raises:
        McaError: A row is invalid, or none is left.
    """
    tokenized = _tokenize_rows(rows, answers, workers)
    if cut := sum(tokenized["is_cut"]):
        text = "%s: %d of %d rows are longer than seq_length %d and are truncated at the end"
        logger.warning(text, answers.key, cut, len(tokenized), answers.length)
    kept, grids = _rows_with_targets(tokenized, answers), None
    if answers.images is not None and any(any(sides) for sides in tokenized["grids"]):
        message = f"{answers.key}: {{}} seq_length {answers.length}"
        kept, grids = _drop_cut_images(kept, tokenized["grids"], answers.images, message)
    samples = TokenDataset.from_samples(sequence for _, row in kept for sequence in row)
    if answers.numbers is not None:
        numbers = tokenized["numbers"]
        samples.values = np.array([numbers[number] for number, row in kept for _ in row], np.float64)
    if answers.images is not None and grids is not None:
        sides = len(kept[0][1])
        row_numbers = (number for number, _ in kept for _ in range(sides))
        table = ImageTable.from_samples(
            (own, [(number, which) for which in range(len(own))])
            for own, number in zip(grids, row_numbers, strict=True)
        )
        samples.images = DatasetImages(
            rows=rows, table=table, read=answers.images, key=answers.key, sides=sides
        )
    return samples


def _rows_with_targets(tokenized: "datasets.Dataset", answers: AnswerRows) -> list[tuple[int, list[Encoded]]]:
    """Return number and sequences of each row in which every sequence has a target; the others are counted.

    Raises:
        McaError: There is none.
    """
    length, key, wanted = answers.length, answers.key, answers.wanted
    columns = zip(tokenized["input_ids"], tokenized["is_target"], strict=True)
    kept = [
        (number, list(zip(tokens, targets, strict=True)))
        for number, (tokens, targets) in enumerate(columns)
        if all(any(side[1:]) for side in targets)
    ]
    if not kept:
        raise McaError(
            f"{key}: no row has {wanted} within seq_length {length}"
            "; raise seq_length, or look at the rows with mca-train data"
        )
    if lacking := len(tokenized) - len(kept):
        text = "%s: %d of %d rows do not have %s within seq_length %d and are left out"
        logger.warning(text, key, lacking, len(tokenized), wanted, length)
    return kept


def _tokenize_rows(rows: "datasets.Dataset", answers: AnswerRows, workers: int | None) -> "datasets.Dataset":
    """Tokenize and truncate the sequences of each row, with a truncation flag, numbers and image grids."""
    import datasets

    own = null_filter(rows.features)

    def tokenize(row: Values, index: int) -> JsonObject:
        place = f"{answers.key}, row {index}"
        try:
            made = answers.encode_row(row if own is None else own(row), place)
        except McaError as error:
            raise McaError(f"{place}: {error}") from error
        return {
            "input_ids": [tokens for tokens, _ in made.sequences],
            "is_target": [targets for _, targets in made.sequences],
            "is_cut": made.is_cut,
            "numbers": made.numbers,
            "grids": [[grid.numbers for grid in side] for side in made.grids],
        }

    features = {"input_ids": lists("int32", 2), "is_target": lists("bool", 2), "grids": lists("float64", 3)}
    features |= {"numbers": lists("float64", 1), "is_cut": datasets.Value("bool")}
    return map_in_memory(rows, tokenize, features, workers)


def _drop_cut_images(
    rows: Sequence[tuple[int, list[Encoded]]],
    grids: Sequence[Sequence[Sequence[Sequence[float]]]],
    images: ImageRows,
    message: str,
) -> tuple[list[tuple[int, list[Encoded]]], list[list[Grid]]]:
    """Drop rows that end within a medium, with a warning; return the others and their sequences' grids."""
    kept, left = [], []
    for number, row in rows:
        sides = (
            (list(map(Grid.from_numbers, own)), tokens)
            for own, (tokens, _) in zip(grids[number], row, strict=True)
        )
        whole = [
            complete_images(own, len(images.tokens.where(tokens)) if own else 0) for own, tokens in sides
        ]
        if None not in whole:
            kept.append((number, row))
            left += [own for own in whole if own is not None]
    if not kept:
        raise McaError(message.format("all rows end within an image, video or audio clip at"))
    if lost := len(rows) - len(kept):
        logger.warning(
            "%s",
            message.format(f"{lost} of {len(rows)} rows end within an image, video or audio clip at")
            + ", left out",
        )
    return kept, left
