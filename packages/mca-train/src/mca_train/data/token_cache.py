"""Tokenized samples are kept on disk, by the content of the files and the settings that made them.

    <cache>/<key>/tokens.npy, offsets.npy, ...              mapped into memory, so ranks and runs share the pages
                  told.json                                 what was said of the rows when they were made
    <cache>/<key>.lock                                      held by whoever makes them; others wait and then read

An entry is written beside its place and renamed, so it is complete or not there.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mca_config.files import write_error
from mca_train.config.arguments import DataArguments
from mca_train.config.default_column import explicit_columns
from mca_train.data.encoding import WarningRecorder
from mca_train.data.image_rows import ImageRows
from mca_train.data.preferences import PairDataset
from mca_train.data.sample_images import DatasetImages, ImageTable
from mca_train.data.token_dataset import TokenDataset

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Samples = TokenDataset | PairDataset
Images = Callable[[], "tuple[datasets.Dataset, ImageRows, str]"]
"""The rows that samples were made of, what they mean, and the argument that named them."""
_VERSION = 12  # of what samples are made of; raised whenever the same rows make others
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
    """The samples of ``key`` in ``folder``, made if they are not there yet.

    Args:
        folder: The cache.
        key: Of :func:`cache_key`.
        make: Makes them.
        images: Where pixels are read, of samples with images.

    Raises:
        McaError: The cache cannot be written.
    """
    place = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            if (found := _load(place, images)) is not None:
                return found
            with _record_warnings() as told:
                made = make()
            _write(place, made, told)
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
    """What tells samples from others: the kind of run, the rows, the tokenizer and the settings that matter.

    Args:
        kind: Of run.
        contents: What says which rows they are, such as the digests of files.
        tokenizer: Makes the tokens.
        arguments: Columns and lengths.
        limit: Rows that are used; None: all.
    """
    settings = {name: value for name, value in vars(arguments).items() if name not in _IRRELEVANT_SETTINGS}
    said = {"version": _VERSION, "kind": kind, "rows": list(contents), "limit": limit, "settings": settings}
    said |= {"tokenizer": _tokenizer_digest(tokenizer), "given": sorted(explicit_columns(arguments))}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def file_digest(file: Path) -> str:
    """Of a file's contents."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while data := stream.read(_CHUNK_BYTES):
            found.update(data)
    return f"{found.hexdigest()} {file.suffix}"


def _tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    said = [type(tokenizer).__name__, words, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """A block that one process is in at a time, where the file system has locks."""
    with lock.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _record_warnings() -> Iterator[list[str]]:
    """A block whose warnings are kept as well."""
    handler, room = WarningRecorder(), logging.getLogger("mca_train.data")
    level, propagates = room.level, room.propagate
    if not room.isEnabledFor(
        logging.WARNING
    ):  # a rank that prints nothing; what it finds is kept all the same
        room.setLevel(logging.WARNING)
        room.propagate = False
    room.addHandler(handler)
    try:
        yield handler.lines
    finally:
        room.removeHandler(handler)
        room.setLevel(level)
        room.propagate = propagates


def _load(place: Path, images: Images) -> Samples | None:
    """What is there; None: nothing that can be used."""
    try:
        said = json.loads((place / "told.json").read_text())
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in said["arrays"]}
        sequences = TokenDataset(
            arrays["tokens"], arrays["offsets"], arrays.get("is_target"), arrays.get("values")
        )
        if int(sequences.offsets[-1]) != len(sequences.tokens):
            return None
        if "starts" in arrays:
            rows, read, key = images()
            table = ImageTable(**{name: arrays[name] for name in _TABLE})
            sequences.images = DatasetImages(rows=rows, table=table, read=read, key=key, sides=said["sides"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for line in said["told"]:
        logger.warning("%s", line)
    logger.info("tokenized before: %s", place)
    return PairDataset(sequences) if said["pairs"] else sequences


def _write(place: Path, made: Samples, told: Sequence[str]) -> None:
    pairs = isinstance(made, PairDataset)
    sequences = made.sequences if isinstance(made, PairDataset) else made
    beside = place.with_name(f"{place.name}.partial-{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        kept = [name for name in _ARRAYS if getattr(sequences, name) is not None]
        for name in kept:
            np.save(beside / f"{name}.npy", getattr(sequences, name))
        said = {"arrays": kept, "pairs": pairs, "told": list(told)}
        if isinstance(images := sequences.images, DatasetImages):
            for name in _TABLE:
                np.save(beside / f"{name}.npy", getattr(images.table, name))
            said |= {"arrays": [*kept, *_TABLE], "sides": images.sides}
        (beside / "told.json").write_text(json.dumps(said))
        shutil.rmtree(place, ignore_errors=True)  # what is there could not be read
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
