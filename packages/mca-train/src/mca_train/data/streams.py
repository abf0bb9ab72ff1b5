"""Streaming datasets (``streaming: true``), which tokenize rows during training.

Rows are in the order of the files, or in that of a shuffle buffer. `batching.sampling` shards the samples over ranks.

Every rank must know for every row whether it has a target, but tokenization is slow. So a row is not tokenized if its
text is short enough that its answer must fit.
"""

import logging
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data.chat import has_generation_marks
from mca_train.data.encoding import BlockTokenizer
from mca_train.data.files import (
    check_file,
    column_names,
    concatenate,
    open_dataset,
    reader_name,
    require_column,
    require_shallow_json,
    translate_read_errors,
)
from mca_train.data.formats import COLUMNS, TEMPLATE_INPUTS
from mca_train.data.image_rows import without_decoding
from mca_train.data.sample_images import stream_images
from mca_train.data.samples import AnswerRows
from mca_train.data.token_dataset import IGNORED, VALUES, Sample
from mca_train.data.tools import null_filter
from mca_train.data.urls import describe_files, is_url, require_readable

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CHECKED_BYTES = 1 << 26  # bytes of a file that are checked before training
_TOKENIZER_BATCH = 64  # rows that pretrain tokenizes together
_TEXT_OVERHEAD = 64  # tokens that a tokenizer may add to a text
_CONVERSATION_OVERHEAD, _TURN_OVERHEAD = 1024, 128  # characters that a chat template may add to either


class Row(JsonObject):
    """Columns of a row; ``place`` is its location in the file, for errors."""

    place: str = ""


class FileRows:
    """Rows of several files.

    Args:
        parts: Files and their readers.
        key: Argument that names the files, for errors.
        limit: Number of first rows to keep; None: all.
        seed: Seed of the shuffle, which differs in each epoch; None: the order of the files.
        buffer_size: Size of the shuffle buffer.
        heads: First row of each file.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, Iterable[Values]]],
        key: str,
        *,
        limit: int | None = None,
        seed: int | None = None,
        buffer_size: int = 1,
        heads: Sequence[Values] = (),
    ) -> None:
        self.heads = heads
        self._parts, self._key, self._limit = parts, key, limit
        self._seed, self._buffer_size = seed, buffer_size
        self._epoch = 0
        self._stamps = {file: _file_stamp(file) for file, _ in parts}

    @property
    def order_description(self) -> str:
        """Description of the order of the rows."""
        first = "" if self._limit is None else f"the first {self._limit} "
        rows = f"{first}rows of {describe_files([file for file, _ in self._parts])}"
        if self._seed is None:
            return f"{rows}, not shuffled"
        return f"{rows}, drawn from a buffer of {self._buffer_size} by seed {self._seed}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shuffle."""
        self._epoch = epoch

    def in_file_order(self) -> "FileRows":
        """Return the same rows, not shuffled."""
        rows = copy(self)
        rows._seed = None
        return rows

    def __iter__(self) -> Iterator[Row]:
        order = np.arange(len(self._parts))
        if self._seed is None:
            yield from islice(self._in_order(order), self._limit)
            return
        draw = np.random.default_rng([self._seed % 2**32, self._epoch])
        if self._limit is None:
            draw.shuffle(order)
        yield from _shuffle_buffer(islice(self._in_order(order), self._limit), self._buffer_size, draw)

    def _in_order(self, order: Iterable[int]) -> Iterator[Row]:
        for file, part in (self._parts[place] for place in order):
            self._warn_changed(file)
            number = 0
            rows = iter(part)
            while True:
                with translate_read_errors(
                    self._key, f"{file}, after row {number - 1}," if number else file, reader_name(file)
                ):
                    found = next(rows, None)
                if found is None:
                    break
                row = Row(found)
                row.place = f"row {number}" + (f" of {redacted(file)}" if len(self._parts) > 1 else "")
                yield row
                number += 1

    def _warn_changed(self, file: str) -> None:
        stamp = _file_stamp(file)
        if None not in (stamp, self._stamps[file]) and stamp != self._stamps[file]:
            logger.warning(
                "%s: %s has changed since the run began; rows may be used twice or not at all",
                self._key,
                redacted(file),
            )
            self._stamps[file] = stamp


def _file_stamp(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None  # reading the file raises the error
    return found.st_size, found.st_mtime_ns


def _shuffle_buffer(rows: Iterable[Row], size: int, draw: np.random.Generator) -> Iterator[Row]:
    buffer: list[Row] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = int(draw.integers(size))
        yield buffer[place]
        buffer[place] = row
    for place in draw.permutation(len(buffer)):
        yield buffer[int(place)]


class SampleBuilder:
    """Builder of samples that keeps the last one, because the filter and the loader may need the same sample.

    Args:
        encode: Function from a row to its sample.
        key: Argument that names the files, for errors.
    """

    def __init__(self, encode: Callable[[Values], Sample], key: str) -> None:
        self._encode, self._key = encode, key
        self._last: tuple[Values, Sample] | None = None

    def __call__(self, row: Values) -> Sample:
        """Return the sample of ``row``.

        Raises:
            McaError: The row is invalid; the message names it.
        """
        if self._last is not None and self._last[0] is row:
            return self._last[1]
        try:
            sample = self._encode(row)
        except McaError as error:
            place = getattr(row, "place", "")
            raise McaError(f"{self._key}{place and ', ' + place}: {error}") from error
        self._last = row, sample
        return sample


class RowsWithTargets:
    """Rows from which a sample with a target can be built.

    Args:
        rows: All rows.
        make: Function from a row to its sample.
        is_sure: Function that returns True if a row has a target for sure, without building its sample.
        warning: Warning about rows without a target.
    """

    def __init__(
        self, rows: FileRows, make: Callable[[Row], Sample], is_sure: Callable[[Row], bool], warning: str
    ) -> None:
        self._rows, self._make, self._is_sure, self._warning = rows, make, is_sure, warning
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shuffle."""
        self._rows.set_epoch(epoch)

    def require_target(self) -> None:
        """Read rows in the order of the files until one has a target.

        Raises:
            McaError: There is none, or a row before it is invalid.
        """
        rows = RowsWithTargets(self._rows.in_file_order(), self._make, self._is_sure, self._warning)
        next(iter(rows), None)

    def __iter__(self) -> Iterator[Row]:
        kept = total = 0
        for row in self._rows:
            total += 1
            if self._is_sure(row) or has_target(self._make(row)):
                kept += 1
                yield row
        if total and not kept:
            raise McaError(
                f"{self._warning}: all {counted(total, 'row')}; raise seq_length, or look at the rows with mca-train "
                "data"
            )
        if kept < total and not self._has_warned:
            logger.warning(
                "%s and are left out: %d of %s", self._warning, total - kept, counted(total, "row")
            )
            self._has_warned = True


def has_target(sample: Sample) -> bool:
    """Return True if every sequence has a target after its first token."""
    return all(
        bool((values[1:] != IGNORED).any()) for name, values in sample.items() if name.endswith("labels")
    )


class RowStream(IterableDataset[Sample]):
    """Stream of samples from ``rows``.

    Attributes:
        order_description: Description of the order of the samples.
        has_images: True if the first row of a file has images.
    """

    def __init__(
        self, rows: "FileRows | RowsWithTargets", order_description: str, has_images: bool = False
    ) -> None:
        self.rows, self.order_description, self.has_images = rows, order_description, has_images

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shuffle."""
        self.rows.set_epoch(epoch)


class AnswerStream(RowStream):
    """Stream of samples with answers; rows without a target are dropped. The trainer builds only those it needs.

    Args:
        rows: Rows of the files.
        answers: Encoding of a row.
        is_sure: Function that returns True if a row has a target for sure, without tokenizing it.
        sides: Prefixes of the sequences of a sample; empty: a sample is one sequence.
    """

    rows: RowsWithTargets

    def __init__(
        self,
        rows: FileRows,
        answers: AnswerRows,
        is_sure: Callable[[Row], bool],
        *,
        sides: Sequence[str] = (),
    ) -> None:
        prefixes = [f"{side}_" for side in sides] or [""]
        key, images = answers.key, answers.images

        def has_target_surely(row: Row) -> bool:
            return is_sure(row) and not (images and images.has_images(row))  # images add tokens

        self.make = SampleBuilder(lambda row: _to_sample(answers, row, prefixes), key)
        warning = f"{key}: rows do not have {answers.wanted} within seq_length {answers.length}"
        has_images = images is not None and any(map(images.has_images, rows.heads))
        kept = RowsWithTargets(rows, self.make, has_target_surely, warning)
        super().__init__(kept, rows.order_description, has_images)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.make, self.rows)


class BlockStream(RowStream):
    """Stream of blocks from concatenated texts, each with EOS.

    Args:
        rows: Rows in the order of concatenation.
        tokenize: Function from a batch of rows and their locations to the tokens of each text.
        length: Tokens of a block.
    """

    def __init__(self, rows: FileRows, tokenize: BlockTokenizer, length: int) -> None:
        super().__init__(rows, f"blocks of {length} tokens of {rows.order_description}")
        self._tokenize, self._length, self._has_warned = tokenize, length, False

    def __iter__(self) -> Iterator[Sample]:
        left: list[int] = []
        rows = iter(self.rows)
        while some := list(islice(rows, _TOKENIZER_BATCH)):
            left += chain.from_iterable(self._tokenize_rows(some))
            whole = len(left) - len(left) % self._length
            for start in range(0, whole, self._length):
                yield {"input_ids": torch.tensor(left[start : start + self._length])}
            left = left[whole:]
        if len(left) > 1:
            yield {"input_ids": torch.tensor(left)}

    def _tokenize_rows(self, rows: list[Row]) -> list[list[int]]:
        """Tokenize ``rows``, with one warning if some have no text."""
        tokens = self._tokenize(rows, [row.place for row in rows])
        if len(tokens) < len(rows) and not self._has_warned:
            logger.warning("train_file: rows without text are left out; this is reported once")
            self._has_warned = True
        return tokens


def open_rows(
    files: Sequence[str],
    key: str,
    arguments: DataArguments,
    column: str | None,
    *,
    seed: int | None,
    vision: Values | None = None,
) -> tuple[FileRows, list[str]]:
    """Open the rows of ``files`` for iteration, and return the names of their columns.

    Args:
        files: Paths.
        key: Argument that names the files, for errors.
        arguments: Names of columns, and limits.
        column: Required column of every file; None: files may differ.
        seed: Seed of the shuffle buffer of ``shuffle_buffer_size`` rows; None: the order of the files.
        vision: Vision configuration of the model; None: a text model.
    """
    heads, parts = _open_files(files, key, arguments, column, vision)
    rows = FileRows(
        parts,
        key,
        limit=arguments.max_train_samples,
        seed=seed if arguments.shuffle_buffer_size > 1 else None,
        buffer_size=arguments.shuffle_buffer_size,
        heads=heads,
    )
    return rows, [*dict.fromkeys(chain.from_iterable(heads))]


def _open_files(
    files: Sequence[str], key: str, arguments: DataArguments, column: str | None, vision: Values | None
) -> "tuple[list[Values], list[tuple[str, datasets.IterableDataset]]]":
    """Return the first row and the reader of each of ``files``."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # datasets logs unreadable files twice
    parts, heads = [], []
    for file in files:
        reader, options = check_file(file, key)
        if is_url(file):
            require_readable(file, key)
        with translate_read_errors(key, file, reader):
            require_shallow_json(file, key, _CHECKED_BYTES)
            part = without_decoding(open_dataset(reader, file, options, streaming=True))
            first = next(iter(part), None)
        if first is None:
            raise McaError(f"{key}: {file} has no rows; set a file with rows")
        require_column(list(first), column, f"{key}: {file}")
        parts.append(part)
        heads.append(first)
    columns = {
        file: sorted(first.keys() & column_names(arguments)) for file, first in zip(files, heads, strict=True)
    }
    if any(some != columns[files[0]] for some in columns.values()):
        differing = "; ".join(f"{file}: {', '.join(some)}" for file, some in columns.items())
        raise McaError(f"{key}: with streaming all files must have the same columns ({differing})")
    with translate_read_errors(key, ", ".join(files), "one"):
        concatenate(parts, files, key, arguments, vision)
    changes = [null_filter(part.features) for part in parts]
    own = [part if change is None else part.map(change) for part, change in zip(parts, changes, strict=True)]
    return heads, list(zip(files, own, strict=True))


def _to_sample(answers: AnswerRows, row: Values, prefixes: Sequence[str]) -> Sample:
    """Return the sample of a row, without targets if it ends within an image."""
    place = getattr(row, "place", "")
    row_place = f"{answers.key}{place and ', ' + place}"
    made = answers.encode_row(row, row_place)
    sample: Sample = {}
    for prefix, (tokens, targets) in zip(prefixes, made.sequences, strict=True):
        ids = torch.tensor(tokens)
        sample[f"{prefix}input_ids"] = ids
        sample[f"{prefix}labels"] = ids.where(torch.tensor(targets), IGNORED)
        if answers.numbers is not None:
            sample[prefix + VALUES] = torch.tensor(made.numbers, dtype=torch.float64)
    for side, (prefix, own) in enumerate(zip(prefixes, made.grids, strict=False)):
        if answers.images is None or not own:
            continue
        found = stream_images(
            answers.images, row, side, sample[f"{prefix}input_ids"].tolist(), own, row_place
        )
        if found is None:
            sample[f"{prefix}labels"] = torch.full_like(sample[f"{prefix}labels"], IGNORED)
        elif found.places:
            sample[f"{prefix}images"] = found
    return sample


def sft_target_check(
    tokenizer: "PreTrainedTokenizerBase", arguments: DataArguments
) -> Callable[[Values], bool]:
    """Return a predicate of SFT rows that certainly have a target, without tokenization.

    It assumes at most two tokens per byte, and at most a thousand characters added by a template.
    """
    marked = has_generation_marks(tokenizer)
    length = arguments.seq_length

    def is_sure(row: Values) -> bool:
        columns = (arguments.messages_column, arguments.completion_column, arguments.text_column)
        if arguments.data_format or COLUMNS & row.keys() or len(row.keys() & {*columns}) > 1:
            return False  # another format, or an ambiguous one
        messages, completion = row.get(arguments.messages_column), row.get(arguments.completion_column)
        if messages is not None:
            others = row.get(arguments.tools_column) or row.get(TEMPLATE_INPUTS)
            return not (marked or others) and _has_early_answer(messages, length)
        if completion is not None:
            prompt = row.get(arguments.prompt_column)
            return (
                isinstance(prompt, str) and isinstance(completion, str) and _is_shorter_than(prompt, length)
            )
        text = row.get(arguments.text_column)
        return isinstance(text, str) and any(letter.isascii() and letter.isalnum() for letter in text[:64])

    return is_sure


def pair_target_check(arguments: PairArguments) -> Callable[[Values], bool]:
    """Return a predicate of preference pairs that certainly have targets in both answers."""
    names = (arguments.prompt_column, arguments.chosen_column, arguments.rejected_column)

    def is_sure(row: Values) -> bool:
        if arguments.data_format or COLUMNS & row.keys():
            return False
        texts = [row.get(name) for name in names]
        return all(isinstance(text, str) for text in texts) and _is_shorter_than(
            str(texts[0]), arguments.seq_length
        )

    return is_sure


def _is_shorter_than(text: str, length: int, others: int = 0) -> bool:
    """Return True if ``text`` has fewer than ``length`` tokens with any tokenizer."""
    room = (length - _TEXT_OVERHEAD) // 2 - others
    return len(text) < room and len(unicodedata.normalize("NFKC", text).encode(errors="replace")) < room


def _has_early_answer(messages: object, length: int) -> bool:
    """Return True if the first answer of a conversation begins within ``length`` tokens."""
    if not isinstance(messages, list):
        return False
    previous: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not content.strip() or message.get("weight") == 0:
            return False
        if message.get("role") == "assistant":
            return _is_shorter_than(
                "".join(previous), length, _CONVERSATION_OVERHEAD + _TURN_OVERHEAD * (len(previous) + 1)
            )
        previous.append(content)
    return False
