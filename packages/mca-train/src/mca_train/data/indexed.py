"""Megatron's indexed datasets, ``<prefix>.bin`` and ``<prefix>.idx``: reading as blocks, and writing.

Both use megatron-core's classes. Tokens stay in the memory-mapped file, so a dataset may be larger than memory. The
largest token is searched once, which reads the whole file, and saved to ``<prefix>.largest.json``, in the folder of the
dataset or in ``tokenized_cache``.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mca_config.errors import McaError, UsageError
from mca_config.files import atomic_write, exclusive_lock, write_error
from mca_models.megatron import platform
from mca_train.data.token_dataset import TokenDataset

logger = logging.getLogger(__name__)

_ENDS = (".bin", ".idx")
_TOKENS_PER_READ = 1 << 22
_SLOW_BYTES = 1 << 30  # above this size a scan is logged


def find_prefix(path: str) -> Path | None:
    """Return the prefix of an indexed dataset that ``path`` names, with or without extension; None: there is none."""
    given = Path(path)
    prefix = given.with_suffix("") if given.suffix in _ENDS else given
    exists = all(Path(f"{prefix}{end}").is_file() for end in _ENDS)
    if given.suffix in _ENDS and not exists:
        raise UsageError(f"datasets: {prefix}.bin and {prefix}.idx must both exist")
    return prefix if exists else None


def indexed_blocks(prefix: Path, length: int, vocab_size: int, cache: str | None = None) -> TokenDataset:
    """Return all documents, concatenated and split into blocks of ``length`` tokens.

    Args:
        prefix: Prefix of the two files.
        length: Tokens of a block.
        vocab_size: Vocabulary size of the tokenizer.
        cache: Directory in which `largest_token` saves its result.

    Raises:
        McaError: The files are corrupt, or use another tokenizer.
    """
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
            "; tokenize it again, or set tokenizer_name_or_path"
        )
    return TokenDataset.in_blocks(tokens, length)


def largest_token(
    file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", cache: str | None = None
) -> int:
    """Return the largest of ``tokens``; 0 if there are none. One process per machine searches, others wait.

    A saved result is valid as long as the size and the times of the file do not change.

    Args:
        file: File of the memory map ``tokens``.
        tokens: All of them.
        cache: Directory of the result; None: that of ``file``.
    """
    saved = _cache_file(file, cache)
    state = _file_state(file, tokens)
    if (found := _read_largest(saved, state)) is not None:
        return found
    if not os.access(saved.parent, os.W_OK):
        return _scan(file, tokens, "at each start, as its folder cannot be written; set tokenized_cache")
    with exclusive_lock(file, "rb"):
        if (found := _read_largest(saved, state)) is not None:
            return found
        found = _scan(file, tokens, f"once; it is kept in {saved}")
        if state == _file_state(file, tokens):
            with contextlib.suppress(OSError), atomic_write(saved) as partial:
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
    """Return what identifies the contents of the file."""
    stat = file.stat()
    return {
        "size": stat.st_size,
        "modified": stat.st_mtime_ns,
        "changed": stat.st_ctime_ns,
        "dtype": str(tokens.dtype),
    }


def _read_largest(saved: Path, state: dict[str, object]) -> int | None:
    try:
        record = json.loads(saved.read_text())
        return int(record["largest"]) if {name: record[name] for name in state} == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _scan(file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", how_often: str) -> int:
    if tokens.nbytes >= _SLOW_BYTES:
        logger.info(
            "%s: reading all %.1f GiB to find the largest token id, %s",
            file,
            tokens.nbytes / (1 << 30),
            how_often,
        )
    pieces = (tokens[start : start + _TOKENS_PER_READ] for start in range(0, len(tokens), _TOKENS_PER_READ))
    return max((int(piece.max()) for piece in pieces), default=0)


def write_indexed(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> tuple[int, int]:
    """Write documents of tokens; return the number of documents and tokens.

    The two files are renamed to their final names when they are complete.

    Raises:
        McaError: The files exist already, or cannot be written.
    """
    platform.prepare()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    targets = [Path(f"{prefix}{end}") for end in _ENDS]
    for target in targets:
        if target.exists():
            raise UsageError(f"--output_prefix: {target} exists; name another prefix")
    partials = [target.with_name(f"{target.name}.partial") for target in targets]
    count = tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(partials[0]), dtype=DType.optimal_dtype(vocab_size))
        for document in documents:
            builder.add_document(np.asarray(document), [len(document)])
            count, tokens = count + 1, tokens + len(document)
        builder.finalize(str(partials[1]))
        for partial, target in zip(partials, targets, strict=True):
            partial.rename(target)
    except OSError as error:
        raise write_error(prefix, error, advice="name another --output_prefix") from error
    finally:
        for partial in partials:
            with contextlib.suppress(OSError):
                partial.unlink()
    return count, tokens
