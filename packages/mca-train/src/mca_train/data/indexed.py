"""Megatron's indexed datasets, ``<prefix>.bin`` and ``<prefix>.idx``: read as blocks, and written from texts.

Both go through megatron-core's own classes. Tokens stay in the file and are mapped, so a dataset may be larger than
memory.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mca_config.errors import McaError, UsageError
from mca_config.files import atomic_write, write_error
from mca_train.data.token_dataset import TokenDataset

logger = logging.getLogger(__name__)

_ENDS = (".bin", ".idx")
_TOKENS_PER_READ = 1 << 22
_SLOW_BYTES = 1 << 30  # above this size a scan is logged


def find_prefix(path: str) -> Path | None:
    """The prefix of an indexed dataset that ``path`` names, with or without its end; None: it names none."""
    given = Path(path)
    prefix = given.with_suffix("") if given.suffix in _ENDS else given
    there = all(Path(f"{prefix}{end}").is_file() for end in _ENDS)
    if given.suffix in _ENDS and not there:
        raise UsageError(f"datasets: {prefix}.bin and {prefix}.idx must both exist")
    return prefix if there else None


def indexed_blocks(prefix: Path, length: int, vocab_size: int, cache: str | None = None) -> TokenDataset:
    """All documents one after another, cut into blocks of ``length`` tokens.

    Args:
        prefix: Of the two files.
        length: Tokens of a block.
        vocab_size: Of the tokenizer: a larger token is of another one.
        cache: Where `largest_token` keeps what it finds.

    Raises:
        McaError: The files are damaged, or made with another tokenizer.
    """
    from mca_models.megatron import platform

    platform.prepare()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        index = IndexedDataset(str(prefix)).index
        lengths = np.asarray(index.sequence_lengths, np.int64)
        pointers = np.asarray(index.sequence_pointers, np.int64)
        tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")
    except (OSError, AssertionError, ValueError, IndexError) as error:
        raise McaError(f"{prefix}.idx: cannot be read as an indexed dataset: {str(error)[:200]}") from error
    expected = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * tokens.itemsize
    if len(tokens) != int(lengths.sum()) or not np.array_equal(pointers, expected):
        raise McaError(
            f"{prefix}.bin: has {len(tokens)} tokens, {prefix}.idx counts {int(lengths.sum())}; one of them is damaged"
        )
    largest = largest_token(Path(f"{prefix}.bin"), tokens, cache)
    if largest >= vocab_size:
        raise McaError(
            f"{prefix}.bin: holds token {largest}, the tokenizer has {vocab_size}; it was made with another tokenizer"
        )
    return TokenDataset.in_blocks(tokens, length)


def largest_token(
    file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", cache: str | None = None
) -> int:
    """The largest of ``tokens``; 0 if there are none. Of the processes of a machine one looks, the others wait.

    What was found before holds while the file has the same size and times.

    Args:
        file: What ``tokens`` are mapped from.
        tokens: All of them.
        cache: The folder to keep it in; None: that of ``file``.
    """
    kept = _cache_file(file, cache)
    state = _file_state(file, tokens)
    if (found := _read_largest(kept, state)) is not None:
        return found
    if not os.access(kept.parent, os.W_OK):
        return _scan(file, tokens, "at each start, as its folder cannot be written; set tokenized_cache")
    with _locked(file):
        if (found := _read_largest(kept, state)) is not None:
            return found
        found = _scan(file, tokens, f"once; it is kept in {kept}")
        if state == _file_state(file, tokens):
            with contextlib.suppress(OSError), atomic_write(kept) as partial:
                partial.write_text(json.dumps({**state, "largest": found}))
    return found


def _cache_file(file: Path, cache: str | None) -> Path:
    if cache is None:
        return file.with_suffix(".largest.json")
    folder = Path(cache)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.largest.json"


def _file_state(file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]") -> dict[str, object]:
    """What is another as soon as the file, or how it is read, is."""
    told = file.stat()
    return {
        "size": told.st_size,
        "modified": told.st_mtime_ns,
        "changed": told.st_ctime_ns,
        "dtype": str(tokens.dtype),
    }


def _read_largest(kept: Path, state: dict[str, object]) -> int | None:
    try:
        said = json.loads(kept.read_text())
        return int(said["largest"]) if {name: said[name] for name in state} == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _scan(file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", how_often: str) -> int:
    if tokens.nbytes >= _SLOW_BYTES:
        logger.info(
            "%s: all %.1f GiB are read for the largest token, %s", file, tokens.nbytes / (1 << 30), how_often
        )
    pieces = (tokens[start : start + _TOKENS_PER_READ] for start in range(0, len(tokens), _TOKENS_PER_READ))
    return max((int(piece.max()) for piece in pieces), default=0)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A block that one process is in at a time, where the file system has locks."""
    with file.open("rb") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write_indexed(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> tuple[int, int]:
    """Writes documents of tokens; how many documents and tokens there are.

    The two files appear under their names when they are complete.

    Raises:
        McaError: They are there already, or cannot be written.
    """
    from mca_models.megatron import platform

    platform.prepare()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    targets = [Path(f"{prefix}{end}") for end in _ENDS]
    for target in targets:
        if target.exists():
            raise UsageError(f"--output_prefix: {target} exists; name another prefix")
    beside = [target.with_name(f"{target.name}.partial") for target in targets]
    count = tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(beside[0]), dtype=DType.optimal_dtype(vocab_size))
        for document in documents:
            builder.add_document(np.asarray(document), [len(document)])
            count, tokens = count + 1, tokens + len(document)
        builder.finalize(str(beside[1]))
        for partial, target in zip(beside, targets, strict=True):
            partial.rename(target)
    except OSError as error:
        raise write_error(prefix, error) from error
    finally:
        for partial in beside:
            with contextlib.suppress(OSError):
                partial.unlink()
    return count, tokens
