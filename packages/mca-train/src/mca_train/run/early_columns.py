"""Columns of local files, read without the libraries that load rows, which take seconds to import."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from mca_config.errors import raised_problems
from mca_train.config.arguments import DataArguments
from mca_train.data.files import COMPRESSED, check_file, reader_name, require_column
from mca_train.data.sources import evaluation_arguments
from mca_train.data.urls import is_url
from mca_train.tasks.task import Task

_READ = 10 << 20
"""Bytes of a file whose rows decide its columns: `datasets` takes them from a first block of this size."""


def column_problems(task: Task, data: DataArguments) -> Iterator[str]:
    """Yield an error for ``train_file`` and ``eval_file`` without the columns that ``task`` reads.

    Files whose columns cannot be read here are checked when they are loaded.
    """
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        columns = {file: read_columns(file, key) for file in files}
        known = {file: names for file, names in columns.items() if names is not None}
        if known and len(known) == len(columns):
            yield from raised_problems(_check, task, data, key, known)


def _check(task: Task, data: DataArguments, key: str, columns: dict[str, tuple[str, ...]]) -> None:
    for file, names in columns.items():
        require_column(names, task.required_column(data), f"{key}: {file}")
    names = tuple(dict.fromkeys(name for found in columns.values() for name in found))
    arguments = evaluation_arguments(data, names) if key == "eval_file" else data
    task.check_columns(names, arguments, key)


def read_columns(file: str, key: str) -> tuple[str, ...] | None:
    """Return the columns of a local file; None if it is a list of rows or compressed, or cannot be read."""
    if is_url(file) or not Path(file).is_file():
        return None
    try:
        check_file(file, key)
        kind = reader_name(file)
        if kind == "text":
            return ("text",)
        if Path(file).suffix.lower() in COMPRESSED:
            return None  # they are read once, with their rows
        if kind in ("parquet", "arrow"):
            return _schema(file, kind)
        with Path(file).open(encoding="utf-8-sig") as lines:
            return _keys(lines)
    except (OSError, ValueError, RecursionError):
        return None


def _schema(file: str, kind: str) -> tuple[str, ...]:
    """Return the columns of a Parquet or Arrow file; pyarrow's import takes 0.3 s of a CPU."""
    if kind == "parquet":
        from pyarrow import parquet

        return tuple(parquet.read_schema(file).names)
    from pyarrow import ArrowInvalid, ipc, memory_map

    with memory_map(file) as source:
        try:
            return tuple(ipc.open_stream(source).schema.names)
        except ArrowInvalid:  # the format of files, which has an index at its end
            return tuple(ipc.open_file(source).schema.names)


def _keys(lines: TextIO) -> tuple[str, ...] | None:
    """Return all keys of the rows in the first block; None if a line is no row, or longer than the block."""
    names: dict[str, None] = {}
    size = 0
    while size < _READ and (line := lines.readline(_READ)):
        if line.strip():
            if not line.lstrip().startswith("{") or len(line) == _READ:
                return None
            names.update(dict.fromkeys(json.loads(line)))
        size += len(line)
    return tuple(names) or None
