"""``streaming: true``: rows of files read as training goes, made into samples one by one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.answered import AnsweredRows, SampleMaker, surely_answered, surely_compared
from mca_train.data.encoding import block_tokenizer, row_encoder
from mca_train.data.file_rows import FileRows, Row
from mca_train.data.files import check_file, column_names, joined, named, require_column, require_shallow
from mca_train.data.load import Kind
from mca_train.data.token_dataset import IGNORED

logger = logging.getLogger(__name__)

_LOOKED_AT = 1 << 26  # bytes of a file before training
_ROWS_AT_ONCE = 64  # that pretrain gives to the tokenizer


class RowStream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows, and what makes a sample of one. Iterated it gives samples; the trainer makes only those it needs.

    Args:
        rows: Those with a target.
        make: The sample of a row.
    """

    def __init__(self, rows: AnsweredRows, make: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        self.rows, self.make = rows, make

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.make, self.rows)


class BlockStream(IterableDataset[dict[str, torch.Tensor]]):
    """All texts one after another, each ended by EOS, cut into blocks as they come.

    Args:
        rows: In the order in which they are joined.
        tokenize: From a batch of rows and their places to the tokens of each text.
        length: Tokens of a block.
    """

    def __init__(
        self, rows: FileRows, tokenize: Callable[[list[Any], Sequence[str]], list[list[int]]], length: int
    ) -> None:
        self._rows, self._tokenize, self._length = rows, tokenize, length
        self._has_told = False

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        left: list[int] = []
        rows = iter(self._rows)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            left += chain.from_iterable(self._told(some))
            whole = len(left) - len(left) % self._length
            for start in range(0, whole, self._length):
                yield {"input_ids": torch.tensor(left[start : start + self._length])}
            left = left[whole:]
        if len(left) > 1:
            yield {"input_ids": torch.tensor(left)}

    def _told(self, rows: list[Row]) -> list[list[int]]:
        """The tokens of ``rows``; that some have no text is said once."""
        tokens = self._tokenize(rows, [row.place for row in rows])
        if len(tokens) < len(rows) and not self._has_told:
            logger.warning("train_file: rows without text are left out; this is said once")
            self._has_told = True
        return tokens


def load_stream(
    kind: Kind, files: Sequence[str], tokenizer: Any, arguments: DataArguments, *, seed: int | None
) -> IterableDataset[dict[str, torch.Tensor]]:
    """The samples of ``files``, read as they are iterated. Rows without a target are left out.

    Args:
        kind: What a sample is made of.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        seed: Of the order, drawn from a buffer of ``shuffle_buffer_size`` rows; None: the files' own.
    """
    key, length = "train_file", arguments.seq_length
    names, parts = _parts(files, key, arguments, arguments.text_column if kind == "pretrain" else None)
    rows = FileRows(
        parts,
        key,
        limit=arguments.max_train_samples,
        seed=seed if arguments.shuffle_buffer_size > 1 else None,
        buffer_size=arguments.shuffle_buffer_size,
    )
    if kind == "pretrain":
        return BlockStream(rows, block_tokenizer(names, tokenizer, arguments, key), length)
    if kind == "dpo":
        from mca_train.data.preferences import pair_encoder

        pair = pair_encoder(names, tokenizer, arguments, key)
        make = SampleMaker(lambda row: _pair(pair(row), length), key)
        told = f"{key}: rows lack an answer within seq_length {length}"
        return RowStream(AnsweredRows(rows, make, surely_compared(arguments), told), make)
    encode = row_encoder(names, tokenizer, arguments, key)
    make = SampleMaker(lambda row: _sample(encode(row), length), key)
    told = f"{key}: rows have no answer within seq_length {length}"
    return RowStream(AnsweredRows(rows, make, surely_answered(tokenizer, arguments), told), make)


def _parts(
    files: Sequence[str], key: str, arguments: DataArguments, column: str | None
) -> tuple[list[str], list[tuple[str, Any]]]:
    """The columns of ``files``, and the reader of each."""
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it tells of files that cannot be read, twice
    parts, names = [], {}
    for file in files:
        reader, options = check_file(Path(file), key)
        with named(key, file, reader):
            require_shallow(Path(file), key, _LOOKED_AT)
            part = datasets.load_dataset(
                reader, data_files=str(file), split="train", streaming=True, **options
            )
            first = next(iter(part), None)
        if first is None:
            raise McaError(f"{key}: {file} has no rows")
        require_column(list(first), column, f"{key}: {file}")
        parts.append((file, part))
        names[file] = list(first)
    columns = {file: sorted(set(some) & column_names(arguments)) for file, some in names.items()}
    if any(some != columns[files[0]] for some in columns.values()):
        told = "; ".join(f"{file}: {', '.join(some)}" for file, some in columns.items())
        raise McaError(f"{key}: with streaming all files must have the same columns ({told})")
    with named(key, ", ".join(files), "one"):
        joined([part for _, part in parts], files, key, arguments)
    return names[files[0]], parts


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
