"""Entries of ``datasets``: files, saved datasets, and datasets on the Hub.

`token_dataset` mixes them.
"""

import dataclasses
import glob
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.fields import build
from mca_config.printable import counted, suggestion
from mca_config.redaction import redacted
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, DefaultColumn, PairArguments, column_keys
from mca_train.data.files import load_rows, reader_name, translate_read_errors
from mca_train.data.formats import COLUMN_KEYS, FORMAT_BY_COLUMN, FORMAT_COLUMNS
from mca_train.data.urls import is_url, strip_query

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_RENAMED_KEYS = dict.fromkeys(("data_format", "kind"), "is called format in an entry; set that instead")


@dataclasses.dataclass(kw_only=True)
class Source:
    """One entry of ``datasets``.

    Args:
        path: A file, a directory (of files, or what ``save_to_disk`` wrote), or a dataset of the Hub.
        name: Name in logs; None: the end of the path.
        split: Split of the dataset.
        subset: Configuration of the dataset.
        revision: Revision of a dataset on the Hub.
        columns: mca's column names, mapped to those of the dataset: ``{"prompt": "question"}``.
        format: Format of its rows; None: ``data_format`` of the run.
        weight: Relative share of the samples of an epoch.
        max_samples: Number of rows to use; None: all.
    """

    path: str
    name: str | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    format: Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"] | None = None
    weight: float | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise McaError(f"weight is {self.weight}; expected a number above 0")
        if self.max_samples is not None and self.max_samples < 1:
            raise McaError(f"max_samples is {self.max_samples}; expected at least 1")

    @property
    def display_name(self) -> str:
        """Name of the source in logs."""
        return self.name or Path(strip_query(self.path)).name.partition(".")[0]

    @property
    def names_file(self) -> bool:
        """True if the path is a file, or has the ending of one and is no directory."""
        path = Path(self.path)
        return path.is_file() or (not path.is_dir() and reader_name(self.path) != "a dataset")


def _unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message about a key that no entry has."""
    if key in _RENAMED_KEYS:
        return f"{key}: {_RENAMED_KEYS[key]}"
    return f"unknown key '{key}'{suggestion(key, known, 'its keys are ' + ', '.join(known))}"


def parse_sources(entries: Sequence[Values]) -> list[Source]:
    """Parse the entries of ``datasets``.

    Raises:
        UsageError: Keys or values are invalid, names are not unique, or only some entries have a weight.
    """
    found: list[Source] = []
    problems: list[str] = []
    for place, entry in enumerate(entries):
        where = f"datasets, entry {place}"
        try:
            found += build([Source], entry, where=where, unknown=_unknown_key)
        except McaError as error:
            problems += (f"{where}: {problem}" for problem in list_problems(error))
    names = [source.display_name for source in found]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    problems += (f"datasets: two are called {name}; set name" for name in twice)
    weighted = [source.weight is not None for source in found]
    if any(weighted) and not all(weighted):
        problems.append(
            "datasets: some entries have a weight and some do not; give all of them a weight, or none"
        )
    raise_problems(problems, "datasets", kind=UsageError)
    return found


def source_arguments(
    source: Source, arguments: DataArguments, present: Collection[str], all_columns: Collection[str], key: str
) -> DataArguments:
    """Return the ``arguments`` of one source.

    Its ``columns`` rename columns. A renamed column of the run may be missing if other sources have it; the image
    column may always be missing.

    Args:
        source: Entry of ``datasets``.
        arguments: Arguments of the run.
        present: Columns of its rows, by mca's names.
        all_columns: Columns of the rows of all sources.
        key: Name of the entry in errors.

    Raises:
        UsageError: The entry names a column that its format does not read.
    """
    names: JsonObject = {}
    for column, name in column_keys(arguments):
        if name in source.columns:
            names[column] = str(name)
        elif column not in COLUMN_KEYS.values() and name in all_columns and name not in present:
            names[column] = DefaultColumn(name)
    choosing = {column for columns in FORMAT_COLUMNS.values() for column in columns}
    renamed = {
        column: name for column, name in names.items() if name in source.columns and column in choosing
    }
    row_format = source.format or arguments.data_format
    if row_format is None and not renamed:
        row_format = next(
            (FORMAT_BY_COLUMN[name] for name in source.columns if name in FORMAT_BY_COLUMN), None
        )
    if row_format is not None and not isinstance(arguments, PairArguments):
        if unused := [name for column, name in renamed.items() if column not in FORMAT_COLUMNS[row_format]]:
            raise UsageError(
                f"{key}: columns: {', '.join(unused)}: format {row_format} does not read it; remove it, or set format"
            )
    return dataclasses.replace(arguments, data_format=row_format, **names)


def evaluation_arguments(arguments: DataArguments, present: Collection[str]) -> DataArguments:
    """Return the ``arguments`` of evaluation rows with the columns ``present``.

    A renamed column may be missing, unless the column of the default name exists and would be ignored.
    """
    usual = {field.name: field.default for field in dataclasses.fields(arguments)}
    names: JsonObject = {
        column: DefaultColumn(name)
        for column, name in column_keys(arguments)
        if column not in COLUMN_KEYS.values() and {name, usual[column]}.isdisjoint(present)
    }
    return dataclasses.replace(arguments, **names)


def load_source(source: Source, key: str, arguments: DataArguments) -> "datasets.Dataset":
    """Load the rows of a source, with mca's names of its columns.

    Raises:
        McaError: The dataset, the split or a column does not exist.
    """
    rows = _load(source, key, arguments)
    absent = [theirs for theirs in source.columns.values() if theirs not in rows.column_names]
    if absent:
        raise UsageError(
            f"{key}: columns: no column {', '.join(absent)} (columns: {', '.join(rows.column_names)})"
        )
    rows = _rename_columns(rows, source.columns, key)
    return rows if source.max_samples is None else rows.select(range(min(source.max_samples, len(rows))))


def _rename_columns(rows: "datasets.Dataset", columns: Mapping[str, str], key: str) -> "datasets.Dataset":
    """Rename ``columns`` in one step, so that two can swap names."""
    new = {theirs: ours for ours, theirs in columns.items()}
    if len(new) < len(columns):
        raise UsageError(f"{key}: columns: a column of the dataset is named twice; name each once")
    replaced = [ours for ours in columns if ours in rows.column_names and ours not in new]
    return rows.remove_columns(replaced).rename_columns(new)


def _load(source: Source, key: str, arguments: DataArguments) -> "datasets.Dataset":
    import datasets

    path = Path(source.path)
    if is_url(source.path) or source.names_file:
        _reject_options(source, key, "a file", ("split", "subset", "revision"))
        return load_rows([source.path], key, arguments)
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    with translate_read_errors(key, source.path, "a dataset"):
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            _reject_options(source, key, "a directory that save_to_disk wrote", ("subset", "revision"))
            found = datasets.load_from_disk(source.path)
            if isinstance(found, datasets.DatasetDict):
                if source.split not in found:
                    raise UsageError(
                        f"{key}: {path} has no split {source.split!r} (splits: {', '.join(found)}); set split"
                    )
                return found[source.split]
            _reject_options(source, key, "a saved dataset without splits", ("split",))
            return found
        if path.is_dir():
            _require_no_pattern(path, key)
        options = _reader_options(path, source, key) if path.is_dir() else {}
        return datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, **options
        )


def _require_no_pattern(directory: Path, key: str) -> None:
    whole = str(directory.resolve())
    if glob.escape(whole) != whole:
        raise UsageError(
            f"{key}: {directory}: datasets treats *, ? and [ in the path of a directory as a pattern; rename it, or "
            "name its files"
        )


def _reader_options(path: Path, source: Source, key: str) -> JsonObject:
    """Return the reader options of a directory, and warn of files that are in no split."""
    import datasets
    from datasets.data_files import FILES_TO_IGNORE

    builder = datasets.load_dataset_builder(source.path, source.subset, revision=source.revision)
    splits = builder.config.data_files or {}
    used = {Path(file).resolve() for files in splits.values() for file in files}
    kinds = {file.suffix for file in used}
    left = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix in kinds and file.name not in FILES_TO_IGNORE and file.resolve() not in used
    ]
    if left and builder.config.name == "default":
        logger.warning(
            "%s: %s: %s not read (%s, ...), because other files are named as splits (train, test, validation); list "
            "each file as an entry, or rename them",
            key,
            redacted(source.path),
            counted(len(left), "file"),
            left[0].relative_to(path),
        )
    # a text file is one document, as if it were named directly, not one per line
    return {"sample_by": "document"} if hasattr(builder.config, "sample_by") else {}


def _reject_options(source: Source, key: str, what: str, names: Sequence[str]) -> None:
    """Raise an error for options that would be ignored.

    Raises:
        UsageError: One of ``names`` is set.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(source)}
    set_options = [name for name in names if getattr(source, name) != defaults[name]]
    if set_options:
        hint = " (max_samples takes the first rows)" if "split" in set_options else ""
        raise UsageError(
            f"{key}: {source.path} is {what}, which has no {' or '.join(set_options)}; remove it{hint}"
        )
