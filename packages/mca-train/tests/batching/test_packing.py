import numpy as np
import pytest
import torch

from mca_config.errors import McaError
from mca_train.batching.collate import PadCollator, StepCollator
from mca_train.batching.packing import (
    PackedDataset,
    PackedSequence,
    first_fit,
    pad_row,
    require_plain_sample,
    sequence_lengths,
)
from mca_train.batching.sampling import CountedSamples, PackedStream
from mca_train.data.token_dataset import PairDataset, TokenDataset


def dataset(lengths):
    rows = [(np.full(length, number + 1), np.arange(length) > 0) for number, length in enumerate(lengths)]
    return TokenDataset.from_samples(rows)


def collator(**options):
    return StepCollator(collate=PadCollator(0), micro_batch_size=1, packed=True, **options)


def step(lengths, room=16, indices=(0,), multiple=1, **options):
    packed = CountedSamples(PackedDataset(dataset(lengths), room, multiple=multiple))
    return collator(**options)(packed.__getitems__(list(indices)))


def test_first_fit_takes_the_first_pack_with_room():
    packs = first_fit(np.array([6, 5, 4, 3, 2]), np.arange(5), 10)
    assert [pack.tolist() for pack in packs] == [[0, 2], [1, 3, 4]]


def test_first_fit_closes_the_fullest_when_too_many_are_open():
    packs = first_fit(np.array([6, 8, 7, 4]), np.arange(4), 10, open_packs=2)
    assert sorted(pack.tolist() for pack in packs) == [[0, 3], [1], [2]]


@pytest.mark.parametrize("seed", [None, 0])
def test_every_sample_is_in_one_pack_and_the_accounts_are_exact(seed):
    lengths = np.random.default_rng(3).integers(1, 60, 500)
    packed = PackedDataset(dataset(lengths), 256, seed=seed)
    assert sorted(np.concatenate(packed.packs)) == list(range(500))
    assert max(lengths[pack].sum() for pack in packed.packs) <= 256
    assert packed.fill.tokens == lengths.sum()
    assert packed.fill.rate == lengths.sum() / (len(packed) * 256)
    assert packed.fill.rate > 0.98 > 0.6 > packed.fill.padded_rate
    assert f"500 samples of {lengths.sum()} tokens" in str(packed.fill)


def test_a_sample_that_does_not_fit_is_named():
    with pytest.raises(McaError, match="train_dataset: sample 1 takes 20 tokens, but a pack holds 16"):
        PackedDataset(dataset([3, 20]), 16, name="train_dataset")


def test_a_row_restarts_positions_and_has_no_target_across_sequences():
    made = step([3, 2, 4])
    (row,) = made.micro_batches
    assert row.input_ids.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert row.labels.tolist() == [[1, 1, 0, 2, 0, 3, 3, 3, 0]]
    assert row.loss_mask.tolist() == [[1, 1, 0, 1, 0, 1, 1, 1, 0]]
    assert row.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert row.cu_seqlens.tolist() == [0, 3, 5, 9] and row.cu_seqlens.dtype == torch.int32
    assert (row.max_seqlen, made.seq_length, made.num_tokens, made.num_samples) == (4, 9, 9, 3)


def test_following_counts_the_tokens_after_each_token_of_its_own_sequence():
    (row,) = step([3, 2, 4]).micro_batches
    assert row.tokens_remaining.tolist() == [[2, 1, 0, 1, 0, 3, 2, 1, 0]]


@pytest.mark.parametrize("size", [2, 3])
def test_each_sequence_of_a_pack_is_padded_so_that_context_ranks_share_it_evenly(size):
    lengths = [5, 2, 12]
    padded = [length + -length % (2 * size) for length in lengths]
    after = []
    for rank in range(size):
        options = {"context_parallel_size": size, "context_parallel_rank": rank, "multiple": 2 * size}
        (row,) = step(lengths, room=48, **options).micro_batches
        assert row.cu_seqlens.tolist() == [0, *np.cumsum(padded)]
        assert [int((row.segments == number).sum()) for number in range(3)] == [n // size for n in padded]
        after.append(row.tokens_remaining[row.tokens_remaining >= 0])
    expected = [left for length in lengths for left in range(length)]
    assert sorted(torch.cat(after).tolist()) == sorted(expected)


def test_rows_of_a_step_have_one_length_the_rest_a_sequence_of_its_own():
    made = step([10, 9], room=10, indices=(0, 1), multiple=1)
    short = made.micro_batches[1]
    assert [row.input_ids.shape for row in made.micro_batches] == [(1, 10), (1, 10)]
    assert short.cu_seqlens.tolist() == [0, 9, 10]
    assert short.loss_mask.sum() == 8
    assert made.num_tokens == 19


def test_what_fills_a_row_up_has_no_positions_that_a_model_may_lack():
    long, short = step([10, 3], room=10, indices=(0, 1), multiple=1).micro_batches
    assert long.position_ids.tolist() == [[*range(10)]]
    assert short.position_ids.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0, 0, 0]]
    assert short.cu_seqlens.tolist() == [0, 3, 10]


def test_a_repeated_pack_does_not_count():
    made = step([3, 2], room=3, indices=(0, ~0))
    assert [int(row.loss_mask.sum()) for row in made.micro_batches] == [2, 0]
    assert (made.num_samples, made.num_tokens) == (1, 3)


def test_context_parallel_ranks_hold_zigzag_parts_of_each_sequence():
    options = {"room": 24, "multiple": 4, "context_parallel_size": 2}
    ranks = [step([3, 8], **options, context_parallel_rank=rank).micro_batches[0] for rank in range(2)]
    assert ranks[0].position_ids.tolist() == [[0, 3, 0, 1, 6, 7]]
    assert ranks[1].position_ids.tolist() == [[1, 2, 2, 3, 4, 5]]
    assert ranks[0].cu_seqlens.tolist() == [0, 4, 12]
    assert sum(int(rank.loss_mask.sum()) for rank in ranks) == 2 + 7


def test_pairs_are_packed_whole():
    pairs = PairDataset(dataset([3, 2, 4, 1, 2, 2]))
    assert sequence_lengths(pairs).tolist() == [[3, 2], [4, 1], [2, 2]]
    packed = PackedDataset(pairs, 10)
    assert [pack.tolist() for pack in packed.packs] == [[0, 1], [2]]
    (row,) = collator()(CountedSamples(packed).__getitems__([0])).micro_batches
    assert row.input_ids.tolist() == [[1] * 3 + [2] * 2 + [3] * 4 + [4]]
    assert row.num_segments == 4


def test_padded_pairs_stand_chosen_above_rejected():
    pairs = CountedSamples(PairDataset(dataset([3, 2, 4, 1])))
    made = StepCollator(collate=PadCollator(0), micro_batch_size=2)(pairs.__getitems__([0, 1]))
    (rows,) = made.micro_batches
    assert rows.input_ids[:, 0].tolist() == [1, 2, 3, 4]
    assert (rows.num_segments, made.num_samples, made.num_tokens) == (4, 2, 10)
    assert torch.equal(rows.segments[:, 0], torch.arange(4))


def test_padding_shuts_no_pair_out_of_a_streams_packs():
    def packs(lengths):
        ids = {
            side: torch.arange(length) for side, length in zip(("chosen", "rejected"), lengths, strict=True)
        }
        pair = {f"{side}_{name}": x for side, x in ids.items() for name in ("input_ids", "labels")}
        return list(PackedStream([pair] * 3, 10, multiple=4, make=None))

    assert [len(pack) for pack in packs((5, 5))] == [1, 1, 1]  # 16 tokens with their padding
    with pytest.raises(McaError, match="sample 0 takes 16 tokens, but a pack holds 12"):
        packs((5, 6))


@pytest.mark.parametrize("values", [[None, None], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]])
def test_padding_of_a_row_is_one_more_sequence_that_does_not_count(values):
    row = [
        PackedSequence(input_ids=ids, labels=ids, num_tokens=count, values=numbers)
        for ids, count, numbers in zip(torch.tensor([[1, 2], [3, 4]]), (2, 1), values, strict=True)
    ]
    assert pad_row(row, 4, 9) is row
    padded = pad_row(row, 7, 9)
    assert [each.input_ids.tolist() for each in padded] == [[1, 2], [3, 4], [9, 9, 9]]
    assert [each.labels.tolist() for each in padded] == [[1, 2], [3, 4], [-100, -100, -100]]
    assert [each.num_tokens for each in padded] == [2, 1, 0]
    expected = [None] * 3 if values[0] is None else [[1, 2], [3, 4], [0, 0]]
    assert [None if each.values is None else each.values.tolist() for each in padded] == expected


def test_a_sample_may_be_padded_at_its_end_alone():
    require_plain_sample({"input_ids": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0], "labels": [1, 2, 3, 0]})
    with pytest.raises(McaError, match="has padding before tokens"):
        require_plain_sample({"input_ids": [1, 0, 2], "attention_mask": [1, 0, 1], "labels": [1, 0, 2]})


class Measured(list):
    """Samples with an attribute of another meaning."""

    lengths = [1] * 4


def test_packs_are_not_filled_beyond_their_length_by_other_lengths():
    samples = [{"input_ids": [1] * length} for length in (1, 1, 5, 1)]
    packs = PackedDataset(Measured(samples), 2, name="train_dataset")
    assert packs[0] == samples[:2]
    with pytest.raises(
        McaError, match="train_dataset: sample 2 has 5 tokens, but had 1 when the packs were made"
    ):
        packs[1]
