"""Accounts of packs, columns of samples and masks of micro-batches, at their edges."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from mca_config.errors import McaError
from mca_train.batching import packing
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import (
    OpenPacks,
    PackedDataset,
    PackingStats,
    collect_values,
    count_samples,
    count_tokens,
    kl_sequence,
    longest_sample,
    require_integers,
    require_plain_sample,
    require_vocabulary,
    sample_tokens,
    split_sequences,
)
from mca_train.batching.position import RunPosition
from mca_train.batching.sampling import BatchShape, StepSampler, rank_samples
from mca_train.trainer.kto import KtoKlPairs


def test_rates_are_shares_of_packs_and_of_rows_padded_to_the_longest() -> None:
    stats = PackingStats(samples=3, tokens=30, packs=1, length=40, longest=20)
    assert (stats.rate, stats.padded_rate) == (0.75, 0.5)
    assert str(stats) == "3 samples of 30 tokens in 1 pack of 40: 75.0% full (padded to the longest: 50.0%)"


def rows(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": [1] * length} for length in lengths]


def test_packs_are_in_the_order_of_the_dataset_without_a_seed() -> None:
    packed = PackedDataset(rows(5, 6, 4, 3), 10, multiple=2)
    assert [pack.tolist() for pack in packed.packs] == [[0, 2], [1, 3]]
    assert packed.units == "packs of 10 tokens, of sequences in multiples of 2"
    assert packed.fill == PackingStats(samples=4, tokens=18, packs=2, length=10, longest=6)
    shuffled = PackedDataset(rows(1, 1, 1, 1), 1, seed=3)
    order = [int(number) for pack in shuffled.packs for number in pack]
    assert order == np.random.default_rng(3).permutation(4).tolist()


@pytest.mark.parametrize(("length", "multiple", "room"), [(9, 1, 9), (9, 2, 10), (9, 4, 12), (7, 4, 12)])
def test_a_sample_of_the_length_fits_with_its_padding(length: int, multiple: int, room: int) -> None:
    pair = {"chosen_input_ids": [1] * 5, "rejected_input_ids": [1] * 2}
    packed = PackedDataset([pair], length, multiple=multiple)
    assert packed.fill.length == room


def test_both_sides_of_a_pair_count_for_the_length() -> None:
    pair = {"chosen_input_ids": [1] * 5, "rejected_input_ids": [1] * 5}
    with pytest.raises(McaError, match="dataset: sample 0 takes 10 tokens, but a pack holds 9"):
        PackedDataset([pair], 9)


def test_packs_are_current_until_the_samples_change() -> None:
    samples = rows(2, 3)
    packed = PackedDataset(samples, 4)
    assert packed.is_current()
    samples[1]["input_ids"] = [1] * 2
    assert not packed.is_current()
    samples[1]["input_ids"] = [1] * 3
    samples.append({"input_ids": [1]})
    assert not packed.is_current()


@pytest.mark.parametrize("known", [True, False])
def test_only_lengths_that_a_dataset_knows_are_compared(known: bool) -> None:
    class Unread:
        """Two samples whose reading is an error."""

        lengths = [2, 3] if known else None

        def __len__(self) -> int:
            return 2

    packed = PackedDataset(rows(2, 3), 4)
    packed.dataset = Unread()
    assert packed.is_current()
    packed.dataset.lengths = [2, 2] if known else None
    assert packed.is_current() != known


def test_a_sample_may_become_shorter_than_it_was_packed() -> None:
    samples = rows(2, 3)
    packed = PackedDataset(samples, 4)
    samples[0]["input_ids"] = [1]
    assert packed[0] == [samples[0]]


def test_as_many_packs_are_open_as_the_limit() -> None:
    assert OpenPacks(4)._limit == packing.OPEN_PACKS == 256
    packs = OpenPacks(4, 2)
    assert [packs.add(item, size) for item, size in (("a", 3), ("b", 4), ("c", 2), ("d", 1))] == [
        None,
        None,
        ["b"],
        None,
    ]
    assert packs.open == [["a", "d"], ["c"]]


def test_a_pair_has_its_columns_on_each_side_and_its_source_on_both() -> None:
    pair = {"chosen_input_ids": [1], "rejected_input_ids": [2], "chosen_labels": [3], "rejected_values": [4]}
    assert split_sequences(pair) == [{"input_ids": [1], "labels": [3]}, {"input_ids": [2], "values": [4]}]
    assert [each["source"] for each in split_sequences({**pair, "source": 5})] == [5, 5]
    assert split_sequences([pair, {"input_ids": [6]}]) == [*split_sequences(pair), {"input_ids": [6]}]


def test_a_pack_has_a_kl_sequence_if_each_of_its_samples_has_one() -> None:
    with_other = {"input_ids": [1], "other_input_ids": [2], "other_labels": [3]}
    assert kl_sequence(with_other) == {"input_ids": [2], "labels": [3]}
    assert kl_sequence({"input_ids": [1]}) == {}
    assert kl_sequence([with_other, with_other]) == [kl_sequence(with_other)] * 2
    assert kl_sequence([with_other, {"input_ids": [1]}]) == []


def test_tokens_and_samples_are_counted_without_padding() -> None:
    assert count_tokens({"input_ids": [1, 2, 0]}) == 3
    assert count_tokens({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}) == 2
    assert (count_samples({"input_ids": [1]}), count_samples([{}, {}]), count_samples([])) == (1, 2, 0)
    assert (longest_sample(rows(5, 3)), longest_sample(rows(5, 3), 4)) == (5, 8)


def test_labels_are_the_tokens_unless_given() -> None:
    ids, labels = sample_tokens({"input_ids": torch.tensor([1, 2], dtype=torch.int32)})
    assert (ids.dtype, ids.tolist(), labels.tolist()) == (torch.int64, [1, 2], [1, 2])
    assert [found.tolist() for found in sample_tokens({"input_ids": [1, 2], "labels": [-100, 5]})] == [
        [1, 2],
        [-100, 5],
    ]
    assert [len(found) for found in sample_tokens({"input_ids": [], "labels": []})] == [0, 0]
    with pytest.raises(McaError, match="has 2 tokens and 1 label; give each token its label"):
        sample_tokens({"input_ids": [1, 2], "labels": [5]})
    with pytest.raises(McaError, match=re.escape("has labels of shape [1, 2]; expected one dimension")):
        sample_tokens({"input_ids": [1, 2], "labels": [[5, 6]]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_tokens_have_a_type_of_integers(dtype: torch.dtype) -> None:
    require_integers(torch.ones(1, dtype=torch.uint8), "it has labels")
    with pytest.raises(McaError, match=f"^it has labels of type {dtype}; expected integers, ids of tokens$"):
        require_integers(torch.ones(1, dtype=dtype), "it has labels")


@pytest.mark.parametrize(
    ("tokens", "labels", "found"),
    [
        ([0, 9, 1], [-100, 0, 9], None),
        (
            [0, 10, 1],
            [0, 0, 0],
            "[0, 10, 1] has token 10 at position 1; expected 0 to 9, the vocabulary of the model;",
        ),
        ([0, 1, -1], [0, 0, 0], "has token -1 at position 2; expected 0 to 9"),
        (
            [0, 1, 2],
            [10, 0, 0],
            "has label 10 at position 0; expected 0 to 9, the vocabulary of the model, or -100",
        ),
        ([0, 1, 2], [0, -1, 0], "has label -1 at position 1"),
        ([0, 1, 2], [0, 0, -101], "has label -101 at position 2"),
        (
            [*range(9), 12],
            [0] * 10,
            "begins with the tokens [0, 1, 2, 3, 4, 5, 6, 7] has token 12 at position 9",
        ),
    ],
)
def test_the_first_token_outside_the_vocabulary_is_named(
    tokens: list[int], labels: list[int], found: str | None
) -> None:
    both = torch.tensor(tokens), torch.tensor(labels)
    for values in (both, tuple(torch.stack([torch.zeros_like(each), each]) for each in both)):
        if found is None:
            require_vocabulary(*values, 10)
            continue
        with pytest.raises(McaError, match=re.escape(found)):
            require_vocabulary(*values, 10)


@pytest.mark.parametrize("name", ["attention_mask", "completion_mask", "assistant_masks"])
def test_a_mask_is_no_label(name: str) -> None:
    require_plain_sample({"input_ids": [1, 2], name: [1, 1]})
    require_plain_sample({"input_ids": [1, 2], name: [1, 0], "labels": [1, 2]})
    with pytest.raises(McaError, match=f"has '{name}' and no 'labels'; give labels, -100 where {name} is 0"):
        require_plain_sample({"input_ids": [1, 2], name: [1, 0]})


def test_positions_count_from_zero() -> None:
    require_plain_sample({"input_ids": [1, 2], "position_ids": [0, 1]})
    require_plain_sample({"input_ids": [1, 2], "position_ids": [[5, 5]] * 3})  # of images
    with pytest.raises(McaError, match="has position_ids that do not count from 0"):
        require_plain_sample({"input_ids": [1, 2], "position_ids": [0, 0]})


def test_a_sequence_without_numbers_has_zeros_if_another_has_some() -> None:
    assert collect_values([{}, {}]) == []
    found = collect_values([{}, {"values": [1.0, 2.0]}, {"values": [3.0, 4.0]}])
    assert [each.tolist() for each in found] == [[0, 0], [1, 2], [3, 4]]


def shape(samples: int = 4, **changes: Any) -> BatchShape:
    sizes = {
        "micro_batch_size": 1,
        "num_micro_batches": samples,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
    }
    return BatchShape(**(sizes | changes))


@pytest.mark.parametrize(
    ("count", "drop", "left", "shares"),
    [
        (4, True, [1, 0, 0, 0], [0.0, 0.25, 1.0, 1.0]),
        (3, True, [1, 1, 0, 0], [0.0, 1 / 3, 1.0, 1.0]),
        (9, True, [2, 2, 1, 0], [0.0, 1 / 8, 0.5, 1.0]),
        (9, False, [3, 2, 2, 0], [0.0, 1 / 9, 4 / 9, 1.0]),
    ],
)
def test_steps_and_shares_of_an_epoch(count: int, drop: bool, left: list[int], shares: list[float]) -> None:
    sampler = StepSampler(count, shape(), drop_last=drop)
    done = (0, 1, 4, 10)
    assert [sampler.steps_after(samples) for samples in done] == left
    assert [sampler.share(samples) for samples in done] == pytest.approx(shares)
    assert sampler.num_steps == left[0] == len(sampler)


def test_each_replica_has_its_part_of_every_micro_batch() -> None:
    parts = [
        rank_samples(
            np.arange(10, 17), shape(2, micro_batch_size=2, data_parallel_size=2, data_parallel_rank=rank)
        )
        for rank in range(2)
    ]
    assert parts == [[10, 11, 14, 15], [12, 13, 16, ~10]]
    assert (
        shape(3, micro_batch_size=2, data_parallel_size=5).row_size,
        shape(3, micro_batch_size=2).global_size,
    ) == (
        10,
        6,
    )


def test_a_step_has_a_group_of_micro_batches_at_least() -> None:
    assert rank_samples(np.array([5]), shape(4, group=3, smallest_group=2)) == [5, ~5, ~5]
    assert rank_samples(np.array([5]), shape(4)) == [5]


def micro(**changes: Any) -> MicroBatch:
    values = {
        "input_ids": torch.tensor([[1, 2, 3, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0]]),
        "labels": torch.tensor([[2, 3, 0, 0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
        "segments": torch.tensor([[4, 4, 4, 4]]),
        "num_segments": 5,
        "tokens_remaining": torch.tensor([[2, 1, 0, -1]]),
    }
    return MicroBatch(**(values | changes))


def test_masks_of_each_depth() -> None:
    batch = micro()
    assert batch.segments_at_depth().tolist() == [[4, 4, 4, -1]]
    assert batch.segments_at_depth(1).tolist() == [[4, 4, -1, -1]]
    assert batch.target_mask(0).tolist() == [[True, True, False, False]]
    assert batch.target_mask(1).tolist() == [[False, True, False, False]]


@pytest.mark.parametrize(("values", "start", "count"), [(None, 0, 1), (torch.zeros(5, 3), 2, 2)])
def test_too_few_numbers_of_a_sample_are_an_error(values: Any, start: int, count: int) -> None:
    message = f"has fewer than {start + count} numbers, {count} of which are per token"
    with pytest.raises(McaError, match=message):
        micro(values=values).next_values(start, count)


def test_numbers_are_those_of_the_next_token() -> None:
    values = torch.zeros(5, 4, dtype=torch.float64)
    values[4] = torch.tensor([9.0, 1.0, 2.0, 3.0])
    assert micro(values=values).next_values(1, 3).tolist() == [[2.0, 3.0, 0.0, 2.0]]
    assert micro(values=values).next_values(1, 2).tolist() == [[2.0, 0.0, 0.0, 2.0]]


def test_a_step_sums_up_its_micro_batches_and_drops_the_experts_of_all() -> None:
    experts = torch.zeros(1, 4, 1, 1, dtype=torch.int16)
    parts = (
        micro(routed_experts=experts, image_tokens=2, audio_tokens=3),
        micro(has_media=True, image_tokens=5),
    )
    sizes = {"seq_length": 4, "num_samples": 2, "num_tokens": 6, "squares": 18}
    other = StepBatch(micro_batches=parts[:1], **sizes)
    step = StepBatch(micro_batches=parts, kl_batch=other, **sizes)
    assert (step.has_media, other.has_media) == (True, False)
    assert (step.image_tokens, step.audio_tokens, step.micro_batch_size, step.checksum) == (7, 3, 1, 0)
    assert other.micro_batch_size == 1
    bare = step.without_routed_experts()
    assert bare.kl_batch is not None and other.without_routed_experts().kl_batch is None
    for found in (*bare.micro_batches, *bare.kl_batch.micro_batches):
        assert found.routed_experts is None and found.input_ids.tolist() == [[1, 2, 3, 0]]


def test_every_tensor_of_a_micro_batch_is_moved() -> None:
    pixels = torch.ones(2)
    batch = micro(images={"pixels": pixels}, values=torch.zeros(5, 1))
    assert [tensor.device.type for tensor in batch.to(torch.device("meta")).tensors()] == ["meta"] * 8
    assert len(list(micro().tensors())) == 6


def test_a_position_ends_at_the_end_of_an_epoch() -> None:
    place = RunPosition(epoch=1, samples=8, epoch_samples=11, step_samples=4, schedule_steps=5, extra_steps=2)
    assert (place.after_step().samples, place.after_step().schedule_steps) == (11, 6)
    following = place.next_epoch(3)
    assert (following.epoch, following.samples, following.extra_steps) == (2, 0, -1)
    again = place.restart_epoch(3)
    assert (again.epoch, again.samples, again.extra_steps) == (1, 0, 5)


class Images:
    def __init__(self, *starts: int) -> None:
        self.places = [range(start, start + 1) for start in starts]


@pytest.mark.parametrize(("starts", "refused"), [((), False), ((0,), False), ((1,), True), ((2,), True)])
def test_an_image_of_a_completion_is_not_exchanged(starts: tuple[int, ...], refused: bool) -> None:
    """The completion begins at token 1."""

    def sample(token: int, **media: Any) -> dict[str, Any]:
        ids = torch.tensor([token, token + 1, token + 2])
        return {"input_ids": ids, "labels": torch.tensor([-100, *ids[1:].tolist()]), **media}

    images = Images(*starts)
    for pair in ([sample(10, images=images), sample(20)], [sample(20), sample(10, images=images)]):
        made = KtoKlPairs(pair, 2, 2)
        if refused:
            with pytest.raises(McaError, match="a completion has an image; put images in prompts only"):
                made[0]
            continue
        assert made[0]["other_input_ids"].tolist() == [
            int(pair[0]["input_ids"][0]),
            int(pair[1]["input_ids"][1]),
        ]
        assert made[0]["other_labels"].tolist() == [-100, int(pair[1]["input_ids"][1])]
        assert made[0].get("other_images") is pair[0].get("images")
