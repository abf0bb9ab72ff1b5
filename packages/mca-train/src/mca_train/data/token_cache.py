"""Disk cache of tokenized samples, keyed by file contents and settings.

    <cache>/<key>/tokens.npy, offsets.npy, ...              memory-mapped, so ranks and runs share the pages
                  metadata.json                             array names and the warnings of the tokenization
    <cache>/<key>.lock                                      held by the process that writes; others wait and then read

An entry is written to a temporary folder and renamed, so it is complete or absent.
"""

import contextlib
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mca_config.files import exclusive_lock, write_error
from mca_train.config.arguments import DataArguments, explicit_columns
from mca_train.data.encoding import WarningRecorder
from mca_train.data.image_rows import ImageRows
from mca_train.data.sample_images import DatasetImages, ImageTable
from mca_train.data.token_dataset import PairDataset, TokenDataset

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Samples = TokenDataset | PairDataset
Images = Callable[[], "tuple[datasets.Dataset, ImageRows, str]"]
"""Function that returns the rows, their image options, and the argument that names the files."""
_VERSION = 16  # raised whenever the same rows give other samples
_ARRAYS = ("tokens", "offsets", "is_target", "values")
_TABLE = ("starts", "grids", "origins")
_CHUNK_BYTES = 1 << 20
_IRRELEVANT_SETTINGS = {
    *(
        "model_name_or_path",
        "tokenizer_name_or_path",
        "train_file",
        "eval_file",
        "datasets",
        "tokenized_cache",
    ),
    *(
        "preprocessing_num_workers",
        "streaming",
        "shuffle_buffer_size",
        "max_train_samples",
        "max_eval_samples",
    ),
}


def load_or_build(folder: Path, key: str, make: Callable[[], Samples], images: Images) -> Samples:
    """Load the samples of ``key`` from ``folder``, or build and save them.

    Args:
        folder: Directory of the cache.
        key: Key from :func:`cache_key`.
        make: Function that builds the samples.
        images: Source of the pixels of samples with images.

    Raises:
        McaError: The cache cannot be written.
    """
    place = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder / f"{key}.lock"):
            if (found := _load(place, images)) is not None:
                return found
            with _record_warnings() as warnings:
                made = make()
            _write(place, made, warnings)
            return made
    except OSError as error:
        raise write_error(folder, error) from error


def cache_key(
    kind: str,
    contents: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    limit: int | None,
) -> str:
    """Return the key of samples: a hash of the task, the rows, the tokenizer and the relevant settings.

    Args:
        kind: Task of the run.
        contents: Identifiers of the rows, such as digests of files.
        tokenizer: Tokenizer of the samples.
        arguments: Names of columns, and lengths.
        limit: Number of rows to use; None: all.
    """
    settings = {name: value for name, value in vars(arguments).items() if name not in _IRRELEVANT_SETTINGS}
    metadata = {
        "version": _VERSION,
        "kind": kind,
        "rows": list(contents),
        "limit": limit,
        "settings": settings,
    }
    metadata |= {"tokenizer": _tokenizer_digest(tokenizer), "given": sorted(explicit_columns(arguments))}
    return hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode()).hexdigest()[:32]


def file_digest(file: Path) -> str:
    """Return the digest of a file's contents, with its extension."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            found.update(data)
    return f"{found.hexdigest()} {file.suffix}"


def _tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    metadata = [
        type(tokenizer).__name__,
        words,
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
    ]
    return hashlib.sha256("\0".join(metadata).encode()).hexdigest()


@contextlib.contextmanager
def _record_warnings() -> Iterator[list[str]]:
    """Context that also records warnings."""
    handler, data_logger = WarningRecorder(), logging.getLogger("mca_train.data")
    level, propagates = data_logger.level, data_logger.propagate
    if not data_logger.isEnabledFor(logging.WARNING):  # a rank that does not log still records warnings
        data_logger.setLevel(logging.WARNING)
        data_logger.propagate = False
    data_logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        data_logger.removeHandler(handler)
        data_logger.setLevel(level)
        data_logger.propagate = propagates


def _load(place: Path, images: Images) -> Samples | None:
    """Load an entry; None: it is missing or unusable."""
    try:
        metadata = json.loads((place / "metadata.json").read_text())
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in metadata["arrays"]}
        sequences = TokenDataset(
            arrays["tokens"], arrays["offsets"], arrays.get("is_target"), arrays.get("values")
        )
        if int(sequences.offsets[-1]) != len(sequences.tokens):
            return None
        if "starts" in arrays:
            rows, read, key = images()
            table = ImageTable(**{name: arrays[name] for name in _TABLE})
            sequences.images = DatasetImages(
                rows=rows, table=table, read=read, key=key, sides=metadata["sides"]
            )
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for line in metadata["warnings"]:
        logger.warning("%s", line)
    logger.info("loaded tokenized samples from %s", place)
    return PairDataset(sequences) if metadata["pairs"] else sequences


def _write(place: Path, made: Samples, warnings: Sequence[str]) -> None:
    pairs = isinstance(made, PairDataset)
    sequences = made.sequences if isinstance(made, PairDataset) else made
    temporary = place.with_name(f"{place.name}.partial-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        kept = [name for name in _ARRAYS if getattr(sequences, name) is not None]
        for name in kept:
            np.save(temporary / f"{name}.npy", getattr(sequences, name))
        metadata = {"arrays": kept, "pairs": pairs, "warnings": list(warnings)}
        if isinstance(images := sequences.images, DatasetImages):
            for name in _TABLE:
                np.save(temporary / f"{name}.npy", getattr(images.table, name))
            metadata |= {"arrays": [*kept, *_TABLE], "sides": images.sides}
        (temporary / "metadata.json").write_text(json.dumps(metadata))
        shutil.rmtree(place, ignore_errors=True)  # the existing entry is unusable
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
