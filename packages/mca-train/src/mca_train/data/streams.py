"""With ``streaming: true`` rows are read as training goes and made into samples one by one.

The order of the rows is that of `file_rows`. How ranks share the samples is decided in `batching.step_stream`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import BlockTokenizer, Encoded, RowEncoder, RowNumbers
from mca_train.data.file_rows import FileRows, Row
from mca_train.data.files import (
    check_file,
    column_names,
    concatenate,
    open_dataset,
    require_column,
    require_shallow_json,
    translate_read_errors,
)
from mca_train.data.image_rows import ImageRows, without_decoding
from mca_train.data.sample_images import stream_images
from mca_train.data.target_filter import RowsWithTargets, SampleBuilder
from mca_train.data.token_dataset import IGNORED, VALUES, Sample
from mca_train.data.tool_arguments import null_filter
from mca_train.data.urls import is_url, require_readable

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_CHECKED_BYTES = 1 << 26  # bytes of a file before training
_TOKENIZER_BATCH = 64  # that pretrain gives to the tokenizer


class AnswerStream(IterableDataset[Sample]):
    """Samples of rows with answers; rows without a target are left out. The trainer makes only those it needs.

    Args:
        rows: Of the files.
        encode: From a row to its sequences.
        is_sure: Whether a row surely has a target, as far as that is known without tokenizing it.
        length: Tokens of a sequence; what is longer is cut.
        key: The argument that named the files, for errors.
        wanted: What a row without a target lacks.
        sides: Names of the sequences, which a sample's tensors begin with; none: there is one.
        numbers: From a row to the numbers of its sequences; None: it has none.
        images: What to make of rows with images; None: there are none.
    """

    def __init__(
        self,
        rows: FileRows,
        encode: RowEncoder,
        is_sure: Callable[[Row], bool],
        length: int,
        key: str,
        *,
        wanted: str,
        sides: Sequence[str] = (),
        numbers: RowNumbers | None = None,
        images: ImageRows | None = None,
    ) -> None:
        prefixes = [f"{side}_" for side in sides] or [""]

        def make(row: Values) -> Sample:
            if images is None:
                sample = _to_sample(encode(row), prefixes, length)
            else:
                sample = _with_images(images, row, encode, prefixes, length, key)
            if numbers is not None:
                said = torch.tensor(numbers(row), dtype=torch.float64)
                sample |= {prefix + VALUES: said for prefix in prefixes}
            return sample

        self.make = SampleBuilder(make, key)
        self.order_description = rows.order_description
        self.has_images = images is not None and any(map(images.has_images, rows.heads))
        """Whether a file begins with a row that has."""
        told = f"{key}: rows do not have {wanted} within seq_length {length}"
        self.rows = RowsWithTargets(rows, self.make, is_sure, told)

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.make, self.rows)


class BlockStream(IterableDataset[Sample]):
    """All texts one after another, each ended by EOS, cut into blocks as they come.

    Args:
        rows: In the order in which they are joined.
        tokenize: From a batch of rows and their places to the tokens of each text.
        length: Tokens of a block.
    """

    def __init__(self, rows: FileRows, tokenize: BlockTokenizer, length: int) -> None:
        self.order_description = f"blocks of {length} tokens of {rows.order_description}"
        self._rows, self._tokenize, self._length = rows, tokenize, length
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, if the rows are shuffled."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        left: list[int] = []
        rows = iter(self._rows)
        while some := list(islice(rows, _TOKENIZER_BATCH)):
            left += chain.from_iterable(self._tokenize_rows(some))
            whole = len(left) - len(left) % self._length
            for start in range(0, whole, self._length):
                yield {"input_ids": torch.tensor(left[start : start + self._length])}
            left = left[whole:]
        if len(left) > 1:
            yield {"input_ids": torch.tensor(left)}

    def _tokenize_rows(self, rows: list[Row]) -> list[list[int]]:
        """The tokens of ``rows``; that some have no text is said once."""
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
    """The rows of ``files``, read as they are iterated, and the names of their columns.

    Args:
        files: Paths.
        key: The argument that named them, for errors.
        arguments: Columns and limits.
        column: Every file must have it; None: they may differ.
        seed: Of the order, drawn from a buffer of ``shuffle_buffer_size`` rows; None: the files' own.
        vision: Of the model's configuration; None: it sees no images.
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
    """The first row of each of ``files``, and its reader."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it tells of files that cannot be read, twice
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
            raise McaError(f"{key}: {file} has no rows")
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


def _to_sample(sequences: Sequence[Encoded], prefixes: Sequence[str], length: int) -> Sample:
    sample = {}
    for prefix, (tokens, targets) in zip(prefixes, sequences, strict=True):
        ids = torch.tensor(tokens[:length])
        sample[f"{prefix}input_ids"] = ids
        sample[f"{prefix}labels"] = ids.where(torch.tensor(targets[:length]), IGNORED)
    return sample


def _with_images(
    images: ImageRows, row: Values, encode: RowEncoder, prefixes: Sequence[str], length: int, key: str
) -> Sample:
    """The sample of a row that may have images; without a target if it ends within one."""
    place = getattr(row, "place", "")
    row_place = f"{key}{place and ', ' + place}"
    sequences, grids = images.encoded(row, encode, row_place)
    sample = _to_sample(sequences, prefixes, length)
    for side, (prefix, own) in enumerate(zip(prefixes, grids, strict=True)):
        if not own:
            continue
        found = stream_images(images, row, side, sample[f"{prefix}input_ids"].tolist(), own, row_place)
        if found is None:
            sample[f"{prefix}labels"] = torch.full_like(sample[f"{prefix}labels"], IGNORED)
        elif found.places:
            sample[f"{prefix}images"] = found
    return sample
