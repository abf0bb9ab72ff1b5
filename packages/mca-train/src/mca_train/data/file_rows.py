"""Iteration over the rows of files, in file order or through a shuffle buffer.

The encoders interpret the rows.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.data.files import reader_name, translate_read_errors
from mca_train.data.urls import describe_files

logger = logging.getLogger(__name__)


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
    """Shuffle ``rows`` through a buffer of ``size`` rows."""
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
