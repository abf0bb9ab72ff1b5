"""``streaming: true``: rows of files read as training goes, made into samples one by one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_train.arguments import DataArguments
from mca_train.data import (
    Kind,
    block_tokenizer,
    check_file,
    column_names,
    joined,
    require_column,
    row_encoder,
)
from mca_train.token_dataset import IGNORED

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 64  # that pretrain gives to the tokenizer


class RowStream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows, and what makes a sample of one. Iterated it gives samples; the trainer makes only those it needs.

    Args:
        rows: A ``datasets.IterableDataset``.
        make: The sample of a row.
    """

    def __init__(self, rows: Any, make: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        self.rows, self.make = rows, make

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.make, self.rows)


class BlockStream(IterableDataset[dict[str, torch.Tensor]]):
    """All texts one after another, each ended by EOS, cut into blocks as they come.

    Args:
        rows: A ``datasets.IterableDataset``.
        tokenize: From a batch of rows to the tokens of each text.
        length: Tokens of a block.
    """

    def __init__(
        self, rows: Any, tokenize: Callable[[list[Any], Sequence[int]], list[list[int]]], length: int
    ) -> None:
        self._rows, self._tokenize, self._length = rows, tokenize, length
        self._has_told = False

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        left: list[int] = []
        rows, number = iter(self._rows), 0
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            left += chain.from_iterable(self._told(some, number))
            number += len(some)
            whole = len(left) - len(left) % self._length
            for start in range(0, whole, self._length):
                yield {"input_ids": torch.tensor(left[start : start + self._length])}
            left = left[whole:]
        if len(left) > 1:
            yield {"input_ids": torch.tensor(left)}

    def _told(self, rows: list[Any], first: int) -> list[list[int]]:
        """The tokens of ``rows``; that some have no text is said once."""
        tokens = self._tokenize(rows, range(first, first + len(rows)))
        if len(tokens) < len(rows) and not self._has_told:
            logger.warning("train_file: rows without text are left out; this is said once")
            self._has_told = True
        return tokens


def load_stream(
    kind: Kind, files: Sequence[str], tokenizer: Any, arguments: DataArguments, *, seed: int | None
) -> IterableDataset[dict[str, torch.Tensor]]:
    """The samples of ``files``, read as they are iterated. A row without an answer takes its place and counts not.

    Args:
        kind: What a sample is made of.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        seed: Of the order, drawn from a buffer of ``shuffle_buffer_size`` rows; None: the files' own.
    """
    key = "train_file"
    column = arguments.text_column if kind == "pretrain" else None
    rows = _rows(files, key, arguments, column)
    first = next(iter(rows), None)
    if first is None:
        raise McaError(f"{key}: {', '.join(files)} has no rows")
    names = list(first)
    if seed is not None and arguments.shuffle_buffer_size > 1:
        rows = rows.shuffle(seed=seed, buffer_size=arguments.shuffle_buffer_size)
    if kind == "pretrain":
        return BlockStream(rows, block_tokenizer(names, tokenizer, arguments, key), arguments.seq_length)
    if kind == "dpo":
        from mca_train.preferences import pair_encoder

        encode = _named(key, pair_encoder(names, tokenizer, arguments, key))
        return RowStream(rows, lambda row: _pair(encode(row), arguments.seq_length))
    encode = _named(key, row_encoder(names, tokenizer, arguments, key))
    return RowStream(rows, lambda row: _sample(encode(row), arguments.seq_length))


def _named(key: str, encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``encode`` with errors that name the argument."""

    def named(row: Any) -> Any:
        try:
            return encode(row)
        except McaError as error:
            raise McaError(f"{key}: {error}") from error

    return named


def _rows(files: Sequence[str], key: str, arguments: DataArguments, column: str | None) -> Any:
    import datasets

    parts = []
    for file in files:
        reader, options = check_file(Path(file), key)
        parts.append(
            datasets.load_dataset(reader, data_files=str(file), split="train", streaming=True, **options)
        )
        require_column(list(next(iter(parts[-1]), {})), column, f"{key}: {file}")
    columns = [set(next(iter(part), {})) & column_names(arguments) for part in parts]
    if any(some != columns[0] for some in columns):
        told = "; ".join(
            f"{file}: {', '.join(sorted(some))}" for file, some in zip(files, columns, strict=True)
        )
        raise McaError(f"{key}: with streaming all files must have the same columns ({told})")
    rows, limit = joined(parts, files, key, arguments), arguments.max_train_samples
    return rows if limit is None else rows.take(limit)


def _sample(encoded: tuple[list[int], list[bool]], length: int) -> dict[str, torch.Tensor]:
    tokens, targets = encoded
    ids = torch.tensor(tokens[:length])
    return {"input_ids": ids, "labels": ids.where(torch.tensor(targets[:length]), IGNORED)}


def _pair(encoded: Sequence[tuple[list[int], list[bool]]], length: int) -> dict[str, torch.Tensor]:
    return {
        f"{side}_{name}": values
        for side, answer in zip(("chosen", "rejected"), encoded, strict=True)
        for name, values in _sample(answer, length).items()
    }
