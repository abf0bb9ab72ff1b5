"""Context-parallel pieces put together give the sequences again."""

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron.layers.zigzag import in_order, ranges_of_rank, take


@pytest.mark.parametrize("size", [1, 2, 3])
def test_taken_pieces_join_in_order(size: int) -> None:
    x = torch.arange(12 * 3).reshape(12, 3)
    pieces = [take(x, 0, rank, size) for rank in range(size)]
    (joined,) = in_order(torch.cat(pieces), (12,), size)
    assert torch.equal(joined, x)


def test_packed_sequences_are_each_cut() -> None:
    lengths = (8, 4)
    assert [(c.sequence, c.start, c.length) for c in ranges_of_rank(lengths, 1, 2)] == [
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
                for c in ranges_of_rank(lengths, rank, 2)
                for base in [0 if c.sequence == 0 else 8]
            ]
        )
        for rank in range(2)
    ]
    first, second = in_order(torch.cat(rows), lengths, 2)
    assert torch.equal(first, whole[:8]) and torch.equal(second, whole[8:])


def test_every_rank_has_the_same_causal_work() -> None:
    work = [sum(c.start * c.length for c in ranges_of_rank((24,), rank, 3)) for rank in range(3)]
    assert len(set(work)) == 1


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(McaError, match=r"10 tokens.*context_parallel_size 2.*multiple of 4"):
        ranges_of_rank((10,), 0, 2)
