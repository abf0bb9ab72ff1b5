"""Samples of a run's files, in memory or streamed.

``data`` reads the files, and the kind of run interprets the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_train.config.arguments import DataArguments
from mca_train.data.files import check_file, load_rows, local_copy, reader_name, translate_read_errors
from mca_train.data.image_rows import RowContext, without_decoding
from mca_train.data.indexed import find_prefix
from mca_train.data.row_paths import row_paths
from mca_train.data.sources import evaluation_arguments, load_source, parse_sources, source_arguments
from mca_train.data.streams import open_rows
from mca_train.data.token_cache import cache_key, file_digest, load_or_build
from mca_train.data.token_dataset import Mixture
from mca_train.data.tools import json_features
from mca_train.data.urls import describe_files
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    import datasets
    from torch.utils.data import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.image_rows import ImageReader, ImageRows
    from mca_train.data.sources import Source
    from mca_train.data.token_dataset import PairDataset, Sample, TokenDataset


def load_tokenized(
    task: Task,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    *,
    evaluation: bool = False,
    images: "ImageReader | None" = None,
) -> "TokenDataset | PairDataset":
    """Return the tokenized samples of ``files``.

    Args:
        task: The kind of run.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        evaluation: True for the evaluation files.
        images: Image reader of the model; None: rows have no images.
    """
    key = "eval_file" if evaluation else "train_file"
    limit = arguments.max_eval_samples if evaluation else arguments.max_train_samples
    context = _context(tokenizer, arguments, key, images, files)
    for file in files:
        check_file(file, key)
    # once, so that the key and the rows have the same content
    copies = [local_copy(file, key) for file in files]

    def load() -> "datasets.Dataset":
        column = task.required_column(arguments)
        return load_rows(files, key, arguments, limit, column, copies, context.vision)

    def context_for(rows: "datasets.Dataset") -> RowContext:
        if not evaluation:
            return context
        return replace(context, data=evaluation_arguments(arguments, rows.column_names))

    def contents() -> list[str]:
        return [f"{file_digest(copy)} {reader_name(file)}" for file, copy in zip(files, copies, strict=True)]

    return _cached_samples(task, context, files, limit, contents, load, context_for)


def _context(
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    key: str,
    images: "ImageReader | None",
    files: Sequence[str],
    revision: str | None = None,
) -> RowContext:
    """Return the context of the rows of ``files``, next to which their media are."""
    reader = images and replace(images, paths=row_paths(files, arguments.image_folder, revision))
    return RowContext(tokenizer=tokenizer, data=arguments, key=key, images=reader)


def _cached_samples(
    task: Task,
    context: RowContext,
    files: Sequence[str],
    limit: int | None,
    contents: Callable[[], list[str]],
    load: "Callable[[], datasets.Dataset]",
    context_for: "Callable[[datasets.Dataset], RowContext]",
) -> "TokenDataset | PairDataset":
    """Return the samples of the rows of ``files``, from ``tokenized_cache`` if it is set.

    Args:
        task: The kind of run.
        context: Tokenizer and arguments, from which the cache's key is made.
        files: Names of the files.
        limit: Number of rows that are read at most; None: all.
        contents: Function that returns digests of the files.
        load: Function that reads the rows.
        context_for: Function that returns the context with the arguments for these rows.
    """

    def make() -> "TokenDataset | PairDataset":
        # parquet is decoded on access
        with translate_read_errors(context.key, ", ".join(files), "text", UnicodeDecodeError):
            rows = load()
            return task.samples(rows, context_for(rows))

    def read_images() -> "tuple[datasets.Dataset, ImageRows, str]":
        rows = without_decoding(load())
        return rows, task.image_rows(rows.column_names, context_for(rows)), context.key

    if (cache := context.data.tokenized_cache) is None:
        samples = make()
    else:
        parts = [context.key, *contents(), *_processors(context.images)]
        key = cache_key(task.name, parts, context.tokenizer, context.data, limit)
        samples = load_or_build(Path(cache), key, make, read_images)
    return _set_order(files, samples)


def _set_order(files: Sequence[str], samples: "TokenDataset | PairDataset") -> "TokenDataset | PairDataset":
    """Return ``samples``, marked as in the order of ``files``."""
    samples.order_description = f"rows of {describe_files(files)}"
    return samples


def _processors(images: "ImageReader | None") -> list[str]:
    """Return cache keys of the processors of media."""
    if images is None or images.config.vision_fields is None:
        return []
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    found = (directory / name for directory in images.directories for name in names)
    return [str(images.config.vision_fields), *(file_digest(file) for file in found if file.is_file())]


def load_mixture(
    task: Task,
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    *,
    seed: int,
    images: "ImageReader | None" = None,
) -> "Mixture":
    """Return the tokenized samples of the sources in ``datasets``.

    Args:
        task: The kind of run.
        tokenizer: Hugging Face tokenizer.
        arguments: The sources; columns and lengths.
        seed: Seed of the selection from sources that are used in part.
        images: Image reader of the model; None: rows have no images.
    """
    sources, parts = parse_sources(arguments.datasets), []
    keys = [f"datasets, {source.display_name}" for source in sources]
    prefixes = [find_prefix(source.path) for source in sources]
    found = [
        load_source(source, key, arguments) if prefix is None else None
        for source, key, prefix in zip(sources, keys, prefixes, strict=True)
    ]
    columns = {name for rows in found if rows is not None for name in rows.column_names}
    for source, key, prefix, rows in zip(sources, keys, prefixes, found, strict=True):
        if prefix is not None:
            _require_plain(source, key)
            parts.append(_set_order([prefix.name], task.indexed(prefix, tokenizer, arguments)))
        if rows is not None:
            own = source_arguments(source, arguments, rows.column_names, columns, key)
            context = _context(tokenizer, own, key, images, [source.path], source.revision)
            parts.append(_source_samples(task, source, rows, context))
    weights = [source.weight for source in sources if source.weight is not None]
    return Mixture(parts, [source.display_name for source in sources], weights or None, seed)


def _require_plain(source: "Source", key: str) -> None:
    """Raise if an option has no meaning for a Megatron indexed dataset."""
    names = ("max_samples", "columns", "subset", "revision", "format")
    ignored = [name for name in names if getattr(source, name)]
    ignored += ["split"] * (source.split != "train")
    if ignored:
        raise UsageError(f"{key}: {', '.join(ignored)}: an indexed dataset has only tokens; remove it")


def _source_samples(
    task: Task, source: "Source", rows: "datasets.Dataset", context: RowContext
) -> "TokenDataset | PairDataset":
    def contents() -> list[str]:
        return [rows._fingerprint, str(len(rows))]

    return _cached_samples(task, context, [source.path], None, contents, lambda: rows, lambda _: context)


def load_stream(
    task: Task,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    *,
    seed: int | None,
    images: "ImageReader | None" = None,
) -> "IterableDataset[Sample]":
    """Return the samples of ``files``, read during iteration. Rows without a target are left out.

    Args:
        task: The kind of run.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        seed: Seed of the order, drawn from a buffer of ``shuffle_buffer_size`` rows; None: the files' own order.
        images: Image reader of the model; None: rows have no images.
    """
    key = "train_file"
    context = _context(tokenizer, arguments, key, images, files)
    column = task.required_column(arguments)
    rows, names = open_rows(files, key, arguments, column, seed=seed, vision=context.vision)
    return task.stream(rows, names, context)


def load_first(
    task: Task,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    *,
    images: "ImageReader | None" = None,
) -> "TokenDataset | PairDataset":
    """Return the samples of the first ``max_train_samples`` rows of a stream; no more rows are read.

    Args:
        task: The kind of run.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        images: Image reader of the model; None: rows have no images.
    """
    import datasets

    key = "train_file"
    context = _context(tokenizer, arguments, key, images, files)
    column = task.required_column(arguments)
    found, _ = open_rows(files, key, arguments, column, seed=None, vision=context.vision)
    datasets.disable_progress_bars()
    first = [{**row} for row in found]
    rows = datasets.Dataset.from_list(first, on_mixed_types="use_json")
    if (features := json_features(rows.features)) is not None:
        rows = datasets.Dataset.from_list(first, features=features)
    return task.samples(rows, context)
