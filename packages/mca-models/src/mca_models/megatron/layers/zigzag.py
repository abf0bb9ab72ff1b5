"""Zigzag sharding of context parallelism: rank r of n holds chunks r and 2n-1-r of 2n equal chunks.

So every rank has the same share of causal work. Packed sequences are sharded one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.errors import McaError


@dataclass(frozen=True)
class TokenRange:
    """Range of tokens on a rank.

    Args:
        sequence: Index of the packed sequence.
        start: Position of its first token within that sequence.
        length: Tokens.
    """

    sequence: int
    start: int
    length: int


@lru_cache(maxsize=64)
def rank_token_ranges(lengths: tuple[int, ...], rank: int, size: int) -> tuple[TokenRange, ...]:
    """Return the ranges of ``rank`` in sequences of these ``lengths``, in the order of its rows.

    Raises:
        McaError: A length is not a multiple of 2 x size.
    """
    if size == 1:
        return tuple(TokenRange(index, 0, length) for index, length in enumerate(lengths))
    chunks = []
    for index, length in enumerate(lengths):
        share, rest = divmod(length, 2 * size)
        if rest:
            raise McaError(
                f"a sequence of {length} tokens cannot be sharded over context_parallel_size {size}; "
                f"pad it to a multiple of {2 * size}"
            )
        chunks += [TokenRange(index, r * share, share) for r in (rank, 2 * size - 1 - rank)]
    return tuple(chunks)


def gather_full_sequences(x: Tensor, lengths: tuple[int, ...], group: ProcessGroup) -> list[Tensor]:
    """Return every full sequence ``[s, ...]`` of ``x`` ``[tokens / cp, ...]``, gathered over the context ranks."""
    if group.size() == 1:
        return list(torch.split(x, list(lengths)))
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    # forward all-gather, backward reduce-scatter, both on axis 0
    return restore_token_order(gather_from_sequence_parallel_region(x, group=group), lengths, group.size())


def restore_token_order(gathered: Tensor, lengths: Sequence[int], size: int) -> list[Tensor]:
    """Return the sequences in order, from the concatenated rows of all ranks.

    Args:
        gathered: ``[size * rows of a rank, ...]``.
        lengths: Tokens of each sequence over all ranks.
        size: Context-parallel ranks.
    """
    pieces: dict[tuple[int, int], Tensor] = {}
    row = 0
    for rank in range(size):
        for chunk in rank_token_ranges(tuple(lengths), rank, size):
            pieces[chunk.sequence, chunk.start] = gathered[row : row + chunk.length]
            row += chunk.length
    ordered: list[list[Tensor]] = [[] for _ in lengths]
    for sequence, start in sorted(pieces):
        ordered[sequence].append(pieces[sequence, start])
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in ordered]


def take_rank_tokens(x: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """Return this rank's part of one unpacked sequence axis."""
    if size == 1:
        return x
    parts = [
        x.narrow(axis, chunk.start, chunk.length) for chunk in rank_token_ranges((x.shape[axis],), rank, size)
    ]
    return torch.cat(parts, axis)
