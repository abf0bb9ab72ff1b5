"""Megatron's indexed datasets, ``<prefix>.bin`` and ``<prefix>.idx``: read as blocks, and written from texts.

Both go through megatron-core's own classes. Tokens stay in the file and are mapped, so a dataset may be larger than
memory.
"""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mca_config.errors import McaError, UsageError
from mca_config.files import write_error
from mca_train.data.largest_token import largest_token
from mca_train.data.token_dataset import TokenDataset

_ENDS = (".bin", ".idx")


def prefix_of(path: str) -> Path | None:
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
