"""`FileRows` reads rows as they are iterated, in the order of the files or drawn from a buffer; each knows its place.

What a row means is not known here: the encoders decide that.
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
    """A row's columns; ``place`` says in errors where it stands in its file."""

    place: str = ""


class FileRows:
    """The rows of several files.

    Args:
        parts: Files and their readers.
        key: The argument that named them, for errors.
        limit: Rows to keep, the first ones; None: all.
        seed: Of the order, drawn anew in each pass; None: the files' own.
        buffer_size: Rows that the next one is drawn from.
        heads: The first row of each file.
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
        """What decides in which order the rows come."""
        first = "" if self._limit is None else f"the first {self._limit} "
        rows = f"{first}rows of {describe_files([file for file, _ in self._parts])}"
        if self._seed is None:
            return f"{rows}, not shuffled"
        return f"{rows}, drawn from a buffer of {self._buffer_size} by seed {self._seed}"

    def set_epoch(self, epoch: int) -> None:
        """Draws another order."""
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
        return None  # told by whoever reads it
    return found.st_size, found.st_mtime_ns


def _shuffle_buffer(rows: Iterable[Row], size: int, draw: np.random.Generator) -> Iterator[Row]:
    """``rows``, each drawn from the ``size`` that come next."""
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
