"""Context-parallel pieces put together give the sequences again."""

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron.layers.zigzag import rank_token_ranges, restore_token_order, take_rank_tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_taken_pieces_join_in_order(size: int) -> None:
    x = torch.arange(12 * 3).reshape(12, 3)
    pieces = [take_rank_tokens(x, 0, rank, size) for rank in range(size)]
    (joined,) = restore_token_order(torch.cat(pieces), (12,), size)
    assert torch.equal(joined, x)


def test_packed_sequences_are_each_cut() -> None:
    lengths = (8, 4)
    assert [(c.sequence, c.start, c.length) for c in rank_token_ranges(lengths, 1, 2)] == [
        (0, 2, 2),
        (0, 4, 2),
        (1, 1, 1),
        (1, 2, 1),
    ]
    whole = torch.arange(12)
    rows = [
        torch.cat(
            [
                whole[base + c.start : base + c.start + c.length]
                for c in rank_token_ranges(lengths, rank, 2)
                for base in [0 if c.sequence == 0 else 8]
            ]
        )
        for rank in range(2)
    ]
    first, second = restore_token_order(torch.cat(rows), lengths, 2)
    assert torch.equal(first, whole[:8]) and torch.equal(second, whole[8:])


def test_every_rank_has_the_same_causal_work() -> None:
    work = [sum(c.start * c.length for c in rank_token_ranges((24,), rank, 3)) for rank in range(3)]
    assert len(set(work)) == 1


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(McaError, match=r"10 tokens.*context_parallel_size 2.*multiple of 4"):
        rank_token_ranges((10,), 0, 2)
