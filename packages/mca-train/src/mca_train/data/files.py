"""Reading of JSONL, JSON, parquet, Arrow and text files into rows.

`encoding` interprets the rows.
"""

import contextlib
import glob
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mca_config.errors import McaError, UsageError
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_models.hub import is_hub_id
from mca_train.config.arguments import DataArguments
from mca_train.data.formats import COLUMNS, TEMPLATE_INPUTS, media_columns
from mca_train.data.tools import json_features
from mca_train.data.urls import (
    download,
    download_error,
    escape_pattern,
    is_missing_file,
    is_url,
    require_client,
    strip_query,
    to_hub_url,
)

if TYPE_CHECKING:
    import datasets

Rows = TypeVar("Rows", "datasets.Dataset", "datasets.IterableDataset")
"""Rows in memory, or rows that are read as they are iterated."""
_DEEPEST = 256
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_DAMAGED_ROW = re.compile(r"JSON parse error: (?!Column\(/)|.* at position \d+$")
"""Errors of pyarrow and ujson about JSON that is no row; those about a type name its column."""
_END_OF_PARSE_ERROR = re.compile(r"\.?( in row \d+)?$")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}

_ENDINGS = " or ".join([", ".join([*_READERS][:-1]), [*_READERS][-1]])


def load_rows(
    files: Sequence[str],
    key: str,
    arguments: DataArguments,
    limit: int | None = None,
    column: str | None = None,
    copies: Sequence[Path] | None = None,
    vision: Values | None = None,
) -> "datasets.Dataset":
    """Load the rows of ``files`` with the columns that samples are made of.

    A ``.txt`` file is one row; other files have one row per record.

    Args:
        files: Paths.
        key: Argument that names the files, for errors.
        arguments: Names of columns.
        limit: Number of rows to keep; None: all.
        column: Required column of every file; None: files may differ.
        copies: Results of `local_copy` for ``files``; None: call it.
        vision: Vision configuration of the model; None: a text model.

    Raises:
        McaError: A file is missing, of an unsupported type, unreadable, or without the column; or there are no rows.
    """
    import datasets

    datasets.disable_progress_bars()
    places: Sequence[Path | None] = copies or [None] * len(files)
    parts = [_load_file(file, key, copy) for file, copy in zip(files, places, strict=True)]
    if not any(map(len, parts)):
        raise McaError(f"{key}: {', '.join(files)} has no rows; set a file with rows")
    for file, part in zip(files, parts, strict=True):
        require_column(part.column_names, column, f"{key}: {file}")
    rows = concatenate(parts, files, key, arguments, vision)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def column_names(arguments: DataArguments) -> set[str]:
    """Return the columns that samples may be made of."""
    return {*COLUMNS, TEMPLATE_INPUTS} | {
        value for name, value in vars(arguments).items() if name.endswith("_column")
    }


def concatenate(
    parts: Sequence[Rows], files: Sequence[str], key: str, arguments: DataArguments, vision: Values | None
) -> Rows:
    """Concatenate ``parts`` with the columns that samples are made of; other columns may differ in type.

    Args:
        parts: Datasets of ``files``, in memory or streamed.
        files: Paths.
        key: Argument that names the files, for errors.
        arguments: Names of columns.
        vision: Vision configuration of the model; None: a text model.

    Raises:
        McaError: A column has different types in two files.
    """
    import datasets

    if len(parts) == 1:
        return parts[0]
    wanted = column_names(arguments) | set(media_columns(vision, arguments))
    kept = [[name for name in part.column_names or () if name in wanted] for part in parts]
    parts = [part.select_columns(names) if names else part for part, names in zip(parts, kept, strict=True)]
    try:
        return datasets.concatenate_datasets(list(parts))
    except (ValueError, TypeError) as error:
        reason = redacted(" ".join(str(error).split()))
        raise McaError(
            f"{key}: the columns of {', '.join(files)} cannot be combined: {reason[:300]}"
        ) from error


def require_column(names: Sequence[str], column: str | None, where: str) -> None:
    """Raise a `UsageError` for a file without the text ``column``."""
    if column is not None and names and column not in names:
        raise UsageError(f"{where}: no column '{column}' (columns: {', '.join(names)}); set text_column")


def check_file(file: str, key: str) -> tuple[str, JsonObject]:
    """Return the reader of ``datasets`` for ``file``, and its options.

    Raises:
        McaError: The file is missing, empty, or of an unsupported type. Files at URLs are not opened.
        UsageError: The URL needs a package that is not installed.
    """
    if is_url(file):
        require_client(file, key)
    else:
        _require_there(Path(file), key)
    reader = _READERS.get(_suffix(file))
    if reader is None:
        ends = Path(strip_query(file)).suffix
        raise McaError(
            f"{key}: {file} ends in '{ends}'; expected one of {', '.join(_READERS)}, or one of these and "
            f"{', '.join(COMPRESSED)}"
        )
    return reader, {"sample_by": "document"} if reader == "text" else {}


def _require_there(path: Path, key: str) -> None:
    if path.is_dir():
        raise McaError(f"{key}: {path} is a directory; name its files{_directory_hint(path, key)}")
    if not path.is_file():
        if path.exists():
            raise McaError(f"{key}: {path} is a pipe, socket or device; name a file")
        hint = _pattern_hint(path, key) or _hub_hint(path, key)
        raise McaError(f"{key}: file {path} does not exist{hint}")
    if path.stat().st_size == 0 and _suffix(str(path)) in _READERS:
        raise McaError(f"{key}: {path} is empty")


def _directory_hint(directory: Path, key: str) -> str:
    """Return the alternative to naming the files of ``directory``, which only training files have."""
    return f", or set datasets: [{{path: {directory}}}]" if key == "train_file" else ""


def _pattern_hint(path: Path, key: str) -> str:
    """Return a hint if the name of the missing file ``path`` is a pattern."""
    if glob.escape(path.name) == path.name:
        return ""
    return f"; patterns are not expanded in YAML; name the files{_directory_hint(path.parent, key)}"


def _hub_hint(path: Path, key: str) -> str:
    """Return a hint if ``path`` is the name of a dataset on the Hub."""
    if reader_name(str(path)) != "a dataset" or not is_hub_id(path):
        return ""
    advice = (
        f"set datasets: [{{path: {path}}}]"
        if key == "train_file"
        else "save its rows to a file and name that"
    )
    return f"; if it is a dataset of the Hub, {advice}"


def _suffix(file: str) -> str:
    """Return the file extension without the extension of a compression."""
    endings = []
    for name in (strip_query(file), file):  # https://host/get?file=rows.jsonl has it in the query
        path = Path(name.lower())
        endings.append(path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix)
    return next((ending for ending in endings if ending in _READERS), endings[0])


def reader_name(file: str) -> str:
    """Return the name of the reader for ``file``."""
    return _READERS.get(_suffix(file), "a dataset")


def _load_file(file: str, key: str, copy: Path | None) -> "datasets.Dataset":
    reader, options = check_file(file, key)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # datasets logs unreadable files twice
    here = copy or local_copy(file, key)
    with translate_read_errors(key, file, reader):
        require_shallow_json(file, key, copy=here)
        return open_dataset(reader, str(here), options, streaming=False)


def open_dataset(
    reader: str, path: str, options: JsonObject, *, streaming: bool
) -> "datasets.Dataset | datasets.IterableDataset":
    """Open the dataset at ``path``; tool-call arguments in JSON keep their nulls.

    ``datasets`` would report each load to the Hub, also of local files, and wait for seconds where there is no network.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    found = {"data_files": escape_pattern(path), "split": "train", "streaming": streaming, **options}
    rows = datasets.load_dataset(reader, **found)
    features = json_features(rows.features) if reader == "json" else None
    return rows if features is None else datasets.load_dataset(reader, **found, features=features)


def local_copy(file: str, key: str) -> Path:
    """Return the local path of ``file``, downloaded if it is a URL.

    Raises:
        McaError: The download fails.
    """
    return download(file, key) if is_url(file) else Path(file)


def require_shallow_json(file: str, key: str, limit: int | None = None, copy: Path | None = None) -> None:
    """Raise an error for JSON nested so deeply that readers overflow their stack and crash.

    Args:
        file: Path or URL.
        key: Argument that names it, for errors.
        limit: Number of bytes to check; None: all.
        copy: Local copy to read instead; its name may differ.

    Raises:
        McaError: A row is nested too deeply.
    """
    if _suffix(file) not in (".json", ".jsonl"):
        return
    import fsspec

    compression = fsspec.utils.infer_compression(strip_query(file))
    with fsspec.open(str(copy or to_hub_url(file)), "rb", compression=compression) as stream:
        for number, line in enumerate(stream):
            if line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(line) > _DEEPEST:
                raise McaError(
                    f"{key}: {file}, row {number}: nested more than {_DEEPEST} deep; leave the row out"
                )
            if limit is not None and stream.tell() > limit:
                return


def _depth(line: bytes) -> int:
    """Return the nesting depth of lists and mappings outside of strings."""
    depth = deepest = 0
    for mark in _MARKS.finditer(line):
        if mark[0] in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark[0] in b"]}":
            depth -= 1
    return deepest


def _describe_unreadable(directory: Path) -> str | None:
    """Describe the files of ``directory``, of which none is of a known type; None: one is, or it is no directory."""
    if not directory.is_dir():
        return None
    endings = Counter(_suffix(file.name) for file in directory.rglob("*") if file.is_file())
    if not endings.keys().isdisjoint(_READERS):
        return None
    if not endings:
        return "it is empty"
    ending, count = endings.most_common(1)[0]
    return f"it has {count} that end in {ending}" if ending else f"it has {count} without an ending"


@contextlib.contextmanager
def translate_read_errors(
    key: str, files: str, reader: str, errors: type[Exception] = Exception
) -> Iterator[None]:
    """Context that turns errors of ``reader`` into one that names ``files``.

    Raises:
        McaError: Reading fails.
    """
    try:
        yield
    except McaError:
        raise
    except errors as error:  # errors of datasets, pyarrow, pandas and codecs
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        subject = f"{key}: {files}"
        if "corresponds to no data" in reason or isinstance(cause, StopIteration):
            raise McaError(f"{subject} has no rows; set a file with rows") from error
        if is_missing_file(error):
            if is_url(files):
                raise download_error(key, files, error) from error
            if (content := _describe_unreadable(Path(files))) is not None:
                raise McaError(f"{subject} has no {_ENDINGS} file ({content})") from error
            raise McaError(f"{subject} is not there any more; put it back and start again") from error
        advice = "; repair or replace the file" if reader in _READERS.values() else ""
        line = _invalid_line(Path(files)) if _DAMAGED_ROW.match(reason) else ""
        if line:
            reason = _END_OF_PARSE_ERROR.sub("", reason, count=1)  # the row counts from a block of the file
        raise McaError(
            f"{subject} cannot be read as {reader}: {line}{redacted(reason)[:200]}{advice}"
        ) from error


def _invalid_line(file: Path) -> str:
    """Return the place of the first line that is no row, for an error; empty: it is not known."""
    if file.suffix.lower() != ".jsonl" or not file.is_file():
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and not _is_row(line):
                return f"line {number}: "
    return ""


def _is_row(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
