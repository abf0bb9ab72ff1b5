from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.megatron.features.sequence_media import MediaJoiner
from mca_models.megatron.layers.zigzag import take_rank_tokens
from mca_train.batching.collate import (
    BatchOptions,
    CollatorFormat,
    ExpertBatching,
    PadCollator,
    StepCollator,
    _require_right_padding,
    _with_sources,
    model_options,
)
from mca_train.batching.packing import pack_row
from mca_train.batching.sampling import CountedSamples
from mca_train.data.token_dataset import TokenDataset

SAMPLES = [([1, 2, 3], [False, True, True]), ([4, 5, 6, 7, 8], [True] * 5), ([9, 9], [True, True])]


def dataset():
    return TokenDataset.from_samples(SAMPLES)


def collator(**options):
    return StepCollator(collate=PadCollator(0), micro_batch_size=2, **options)


def batch(indices, **options):
    data = CountedSamples(dataset())
    return collator(**options)(data.__getitems__(indices))


def test_pads_to_the_longest_of_the_step_and_shifts_the_labels():
    step = batch([0, 1])
    (micro,) = step.micro_batches
    assert micro.input_ids.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert micro.labels.tolist() == [[2, 3, 0, 0, 0], [5, 6, 7, 8, 0]]
    assert micro.loss_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert micro.tokens_remaining.tolist() == [[2, 1, 0, -1, -2], [4, 3, 2, 1, 0]]
    assert (step.seq_length, step.num_samples, step.num_tokens, step.squares) == (5, 2, 8, 9 + 25)
    assert micro.longest == 5
    assert batch([0, 1], packed=True).squares == 9 + 25


def test_length_is_rounded_up():
    assert batch([0, 1], multiple=8).seq_length == 8
    assert batch([0, 1], length=12).seq_length == 12


@pytest.mark.parametrize("options", [{"multiple": 8}, {"length": 7}, {"multiple": 8, "packed": True}])
def test_padding_takes_no_position_that_the_model_has_not_learned(options):
    (micro,) = batch([0, 1], positions=5, **options).micro_batches
    assert micro.position_ids.max() == 4
    assert batch([0, 1], **options).seq_length == micro.input_ids.shape[1]


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_beyond_the_learned_positions_is_refused_on_the_host(packed):
    assert len(batch([0, 2], positions=4, packed=packed).micro_batches) == 1
    with pytest.raises(
        McaError, match="a sequence of 5 tokens is longer than the model's 4 learned positions"
    ):
        batch([0, 1], positions=4, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_that_share_samples_have_one_checksum(packed):
    options = {"context_parallel_size": 2, "multiple": 4, "packed": packed}
    known = batch([0, 1], **options).checksum
    assert batch([0, 1], context_parallel_rank=1, **options).checksum == known
    others = [batch(indices, **options).checksum for indices in ([1, 0], [0, 2], [0, ~1], [0, 1, 0, 1])]
    data = TokenDataset.from_samples([SAMPLES[0], (SAMPLES[1][0], [False, *[True] * 4])])
    relabelled = collator(**options)([(data[0], True), (data[1], True)]).checksum
    assert len({known, relabelled, *others}) == 6


def test_the_checksum_is_of_what_stands_beside_too():
    samples = [
        ({**dataset()[0], "other_input_ids": [1, 2], "other_labels": [1, last]}, True) for last in (2, 3)
    ]
    first, second = (collator()([sample]) for sample in samples)
    assert first.kl_batch.checksum != second.kl_batch.checksum and first.checksum != second.checksum


def test_micro_batches_have_one_length():
    step = batch([0, 0, 2, 1])
    assert [m.input_ids.shape for m in step.micro_batches] == [(2, 5), (2, 5)]


def test_a_repeated_sample_does_not_count():
    step = batch([0, ~1])
    assert step.micro_batches[0].loss_mask.sum() == 2
    assert (step.num_samples, step.num_tokens, step.squares) == (1, 3, 9)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_slices_hold_every_token_once(size):
    whole = batch([0, 1], multiple=2 * size)
    parts = [
        batch([0, 1], multiple=2 * size, context_parallel_size=size, context_parallel_rank=rank)
        for rank in range(size)
    ]
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        got = torch.cat([getattr(part.micro_batches[0], name) for part in parts], 1)
        want = getattr(whole.micro_batches[0], name)
        assert got.sort(1).values.equal(want.sort(1).values)


def test_zigzag_is_megatrons():
    whole = torch.arange(8)[None]
    assert take_rank_tokens(whole, 1, 0, 2).tolist() == [[0, 1, 6, 7]]
    assert take_rank_tokens(whole, 1, 1, 2).tolist() == [[2, 3, 4, 5]]


def test_through_a_data_loader_with_workers():
    loader = DataLoader(
        CountedSamples(dataset()),
        batch_sampler=[[0, 1], [2, ~2]],
        collate_fn=collator(),
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [step.num_samples for step in loader] == [2, 1]


def test_a_hugging_face_collator_does():
    def features(samples):
        ids = torch.tensor([[5, 6], [7, 0]])
        return {
            "input_ids": ids,
            "labels": torch.tensor([[5, 6], [7, -100]]),
            "attention_mask": (ids != 0).long(),
        }

    step = StepCollator(collate=features, micro_batch_size=2)(CountedSamples(dataset()).__getitems__([0, 2]))
    assert step.micro_batches[0].loss_mask.tolist() == [[1, 0], [0, 0]]
    assert step.num_tokens == 3


def shift_by(count):
    """Return a collator of ``tokens[:-count]`` and ``labels[count:]``, as LLaMA-Factory's is for 1."""

    def collate(features):
        ids, labels = (
            [each["input_ids"][:-count] for each in features],
            [each["labels"][count:] for each in features],
        )
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(ids, batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
            "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
        }

    return collate


def shifted_batch(collate, collator_format):
    features = [{name: torch.as_tensor(each[name]) for name in ("input_ids", "labels")} for each in dataset()]
    step = StepCollator(collate=collate, micro_batch_size=2, collator_format=collator_format, length=5)
    (micro,) = step([(feature, True) for feature in features[:2]]).micro_batches
    return micro.input_ids * micro.loss_mask.long(), micro.labels, micro.loss_mask, micro.position_ids


def test_shifted_labels_make_the_micro_batch_of_unshifted_ones():
    expected = shifted_batch(PadCollator(0), CollatorFormat())
    shifted = shifted_batch(shift_by(1), CollatorFormat(labels_are_shifted=True))
    assert all(map(torch.equal, shifted, expected))
    for wrong in (
        shifted_batch(shift_by(1), CollatorFormat()),
        shifted_batch(shift_by(2), CollatorFormat(labels_are_shifted=True)),
    ):
        assert not torch.equal(wrong[1], expected[1])


def test_shifted_labels_of_a_pack_are_labels_of_its_tokens():
    samples = [{"input_ids": torch.arange(3), "labels": torch.arange(3) + 1} for _ in range(2)]
    for is_shifted, labels in ((True, [1, 2, 3] * 2), (False, [2, 3, 0] * 2)):
        made = collator(packed=True, collator_format=CollatorFormat(labels_are_shifted=is_shifted))
        (micro,) = made([(samples, True)]).micro_batches
        assert micro.labels.tolist() == [labels]


def padded(features, *names):
    """A collator that knows nothing of values and of padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([torch.as_tensor(each[name]) for each in features], True) for name in names}


def test_what_a_collator_leaves_out_is_that_of_the_samples():
    samples = [{"input_ids": [5, 6, 7], "values": [2.0]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
    made = StepCollator(collate=lambda features: padded(features, "input_ids"), micro_batch_size=2)
    own = StepCollator(collate=PadCollator(0), micro_batch_size=2)
    for some in ([0, 1, 2, 1], [1, 2, 0, 1]):  # a micro-batch of which no sample has values
        given = [(samples[number], True) for number in some]
        found, wanted = made(given), own(given)
        for ours, theirs in zip(found.micro_batches, wanted.micro_batches, strict=True):
            for name in ("values", "tokens_remaining", "labels", "loss_mask"):
                assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        assert found.num_tokens == wanted.num_tokens == 7


def test_a_collator_may_change_tokens_of_a_sample_that_it_does_not_pad():
    def masked(features):
        rows = padded(features, "input_ids", "labels")
        rows["input_ids"][0, 1] = 99
        return rows

    samples = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    made = StepCollator(collate=masked, micro_batch_size=2)([(sample, True) for sample in samples])
    assert made.num_tokens == 4


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32"])
def test_padding_is_known_of_samples_in_every_type_of_integers(kind):
    def wider(features):
        return padded([{"input_ids": each["input_ids"].astype("int64")} for each in features], "input_ids")

    samples = [{"input_ids": np.array(tokens, kind)} for tokens in ([5, 6, 7], [5, 0])]
    counted = [(sample, True) for sample in samples]
    for collate in (wider, PadCollator(0)):
        assert StepCollator(collate=collate, micro_batch_size=2)(counted).num_tokens == 5
    row = pack_row(counted, 2, 0)
    assert [sequence.input_ids.tolist() for sequence in row] == [[5, 6, 7, 0], [5, 0]]
    assert [sequence.labels.tolist() for sequence in row] == [[5, 6, 7, -100], [5, 0]]


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (("input_ids",), {}, "data_collator made no labels, which samples of the dataset have; return them"),
        (("input_ids", "labels"), {"values": [1.0]}, "data_collator made no tensor 'values'"),
        (
            ("input_ids", "labels"),
            {"input_ids": torch.tensor([[1, 5, 6], [1, 7, 0]])},
            "return attention_mask",
        ),
        (
            ("labels",),
            {"input_ids": torch.tensor([[5, 6, 7, 8]])},
            "made 1 row of 2 samples; expected one row",
        ),
    ],
)
def test_what_a_collator_must_say_itself_is_one_line(names, changes, message):
    samples = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7], "labels": [7]}]
    step = StepCollator(collate=lambda features: padded(features, *names) | changes, micro_batch_size=2)
    with pytest.raises(McaError, match=message):
        step([(sample, True) for sample in samples])
    if "labels" not in names:
        del samples[0]["labels"]
        with pytest.raises(McaError, match=message):
            step([(sample, True) for sample in samples])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1], [1, 1]])}, "set padding_side of its tokenizer to 'right'"),
        ({"attention_mask": torch.ones(2, 1, 2, 2)}, "that is not .samples, tokens."),
        ({"position_ids": torch.tensor([[0, 0], [0, 1]])}, "set sequence_packing"),
    ],
)
def test_rows_that_attention_would_take_for_others_are_refused(changes, message):
    ids = torch.tensor([[5, 6], [7, 8]])
    step = StepCollator(collate=lambda samples: {"input_ids": ids, **changes}, micro_batch_size=2)
    with pytest.raises(McaError, match=message):
        step(CountedSamples(dataset()).__getitems__([0, 2]))


@pytest.mark.parametrize("packed", [False, True])
def test_columns_that_say_what_labels_say_are_refused_without_labels(packed):
    step = StepCollator(collate=PadCollator(0), micro_batch_size=1, packed=packed)
    for name in ("attention_mask", "completion_mask", "assistant_masks"):
        ids = {"input_ids": [1, 2, 3]}
        with pytest.raises(McaError, match=f"'{name}' and no 'labels'; give labels, -100 where {name} is 0"):
            step([(ids | {name: [1, 1, 0]}, True)])
        made = step(
            [(ids | {name: [1, 1, 0], "labels": [1, 2, -100]}, True), (ids | {name: [True] * 3}, True)]
        )
        step([(ids | {name: torch.tensor([True, True, False]), "labels": [1, 2, -100]}, True)])
        assert made.num_tokens == (5 if name == "attention_mask" else 6), "padding is none of them"
        assert made.micro_batches[0].longest == (2 if name == "attention_mask" else 3)
        assert [int(batch.loss_mask.sum()) for batch in made.micro_batches] == [1, 2]
    with pytest.raises(McaError, match="padding before tokens"):
        step([(ids | {"attention_mask": [0, 1, 1], "labels": [-100, 2, 3]}, True)])
    with pytest.raises(McaError, match="position_ids that do not count from 0"):
        step([(ids | {"position_ids": [0, 1, 0]}, True)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_numbers_of_tokens_stand_beside_the_token_before(packed: bool, size: int) -> None:
    lengths, longest = (5, 8, 3), 8
    samples = []
    for length in lengths:
        ids = torch.arange(length) + 10 * length
        numbers = torch.nn.functional.pad(ids.double() + 0.5, (0, longest - length), value=-1)
        values = torch.cat([torch.tensor([0.25], dtype=torch.float64), numbers])
        samples.append(({"input_ids": ids, "labels": ids, "values": values}, True))
    for rank in range(size):
        made = StepCollator(
            collate=PadCollator(0),
            micro_batch_size=3,
            packed=packed,
            multiple=2 * size,
            context_parallel_size=size,
            context_parallel_rank=rank,
        )(samples)
        batch = made.micro_batches[0]
        targets = batch.loss_mask > 0
        assert targets.any()
        found = batch.next_values(1, longest)
        assert torch.equal(found[targets], batch.labels[targets] + 0.5)
        with pytest.raises(McaError, match="fewer than 10 numbers, 9 of which are per token"):
            batch.next_values(1, 9)


IDS = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (IDS | {"labels": [-1, 2, 3]}, "has label -1 at position 0; expected 0 to 9, .* or -100"),
        (IDS | {"labels": [1, 2, 10]}, "tokens .1, 2, 3. has label 10 at position 2; expected 0 to 9"),
        (
            {"input_ids": [1, 10, 3], "labels": [-100] * 3},
            "has token 10 at position 1; expected 0 to 9",
        ),
        ({"input_ids": [1, -100, 3]}, "has token -100 at position 1; expected 0 to 9"),
        (IDS | {"labels": [0.7, 2, 3]}, "labels of type torch.float32; expected integers"),
        (IDS | {"labels": [True, False, True]}, "labels of type torch.bool; expected integers"),
        (IDS | {"labels": [1, 2]}, "3 tokens and 2 labels"),
        (IDS | {"labels": [1, 2, 3, 4]}, "3 tokens and 4 labels"),
        (IDS | {"labels": 1}, "labels of shape .*; expected one dimension"),
        ({"input_ids": torch.tensor([[1, 2, 3]])}, r"input_ids of shape \[1, 3\]; expected one dimension"),
    ],
)
def test_tokens_and_labels_of_no_vocabulary_or_other_lengths_are_errors(sample, message, packed):
    step = collator(vocab_size=10, packed=packed)
    kept = IDS | {"labels": [-100, 0, 9]}
    assert step([(kept, True), ({"input_ids": []}, True), (kept, False)]).num_tokens == 3
    with pytest.raises(McaError, match=message):
        step([(kept, True), (sample, True)])


@pytest.mark.parametrize("packed", [False, True])
def test_padding_may_be_a_token_that_the_model_does_not_have(packed):
    padded = {"input_ids": [1, 2, 10], "attention_mask": [1, 1, 0], "labels": [1, 2, -100]}
    made = StepCollator(
        collate=PadCollator(10), micro_batch_size=2, packed=packed, multiple=8, pad_token_id=10, vocab_size=10
    )
    assert made([(padded, True), ({"input_ids": [1, 2, 3, 4]}, True)]).num_tokens == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([[2], [2]])}, r"labels of shape \[2, 1\] for input_ids of \[2, 2\]"),
        ({"labels": torch.ones(2, 2)}, "made labels of type torch.float32"),
        ({"input_ids": torch.ones(2, 2)}, "made input_ids of type torch.float32"),
        (
            {"labels": torch.tensor([[1, 2], [3, 10]])},
            r"\[3, 4\] has label 10 at position 1; expected 0 to 9",
        ),
        ({"input_ids": torch.tensor([[1, 2], [3, 10]])}, "has token 10 at position 1; expected 0 to 9"),
    ],
)
def test_rows_of_a_collator_are_checked_like_samples(changes, message):
    ids = torch.tensor([[1, 2], [3, 4]])
    whole = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for rows in (whole, whole | changes):
        step = StepCollator(collate=lambda samples, rows=rows: rows, micro_batch_size=2, vocab_size=10)
        if rows is whole:
            assert step(CountedSamples(dataset()).__getitems__([0, 2])).num_tokens == 4
    with pytest.raises(McaError, match=message):
        step(CountedSamples(dataset()).__getitems__([0, 2]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("value", [-100.0, -1.0, 3.0, 1.7, float("nan")])
def test_a_class_that_the_head_does_not_have_is_an_error(value, packed):
    step = collator(num_classes=3, packed=packed)
    kept = [(IDS | {"values": [float(number)]}, True) for number in range(3)]
    assert step(kept).num_samples == 3
    with pytest.raises(
        McaError, match=f"has class {value:g} in 'values'; expected a whole number from 0 to 2"
    ):
        step([*kept, (IDS | {"values": [value]}, True)])


@pytest.mark.parametrize(
    ("mask", "is_right"),
    [
        ([[1, 1, 0], [1, 0, 0]], True),
        ([[0, 0, 0], [1, 1, 1]], True),
        ([[1, 1, 1], [1, 0, 1]], False),
        ([[1, 1, 0], [0, 0, 1]], False),
        ([[0, 1, 1], [1, 1, 1]], False),
        ([[1, 1], [1, 1]], False),
    ],
)
def test_padding_is_behind_the_tokens_of_each_row(mask, is_right):
    batch = {"input_ids": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 9], [0, 7, 9]])}
    if not is_right:
        with pytest.raises(McaError, match="data_collator made rows with padding before tokens"):
            _require_right_padding(batch, torch.tensor(mask))
    elif mask[0][0]:
        _require_right_padding(batch, torch.tensor(mask))
    else:
        with pytest.raises(McaError, match="position_ids that do not count from 0"):
            _require_right_padding(batch, torch.tensor(mask))


def test_sources_are_those_of_a_mixture_alone():
    sequences = [({"source": torch.tensor(2)}, True), ({"source": torch.tensor(5)}, False)]
    step = StepCollator(collate=PadCollator(0), micro_batch_size=1)([({"input_ids": [1, 2]}, True)])
    (batch,) = step.micro_batches
    assert _with_sources(batch, sequences).sources.tolist() == [2, 5]
    for other in ([({}, True)], [sequences[0], ({}, True)]):
        assert _with_sources(batch, other) is batch


@pytest.mark.parametrize("is_first_stage", [False, True])
@pytest.mark.parametrize(("learned", "positions"), [(False, None), (True, 77)])
@pytest.mark.parametrize(("packed", "multiple"), [(False, 192), (True, 6)])
def test_a_rank_collates_for_its_model_and_its_layout(is_first_stage, learned, positions, packed, multiple):
    """A row has two slices for each of 3 context ranks; padded rows have few lengths on a GPU."""
    config = SimpleNamespace(
        max_position_embeddings=77,
        embedding=SimpleNamespace(learned_positions=learned),
        vocab_size=130,
        model_type="qwen3",
        mrope="sections",
        vision=None,
        mtp_num_layers=1,
    )
    layout = ParallelLayout(context_parallel_size=3, tensor_model_parallel_size=2)
    ranks = SimpleNamespace(
        layout=layout,
        context_parallel_rank=2,
        device=torch.device("cuda"),
        is_first_stage=is_first_stage,
    )
    megatron = SimpleNamespace(
        sequence_parallel=True, fp8=None, fp8_recipe="delayed", transformer_impl="transformer_engine"
    )
    pad, own = PadCollator(5), model_options(SimpleNamespace(config=config), ranks, requires_experts=True)
    options = BatchOptions(collate=pad, pad_token_id=5, num_classes=4, **own)
    assert StepCollator.for_rank(
        options, ranks, megatron, micro_batch_size=3, packed=packed, length=9
    ) == StepCollator(
        collate=pad,
        pad_token_id=5,
        images=MediaJoiner(decodes=is_first_stage, sections=True, predicts=True),
        experts=ExpertBatching(config=config, required=True),
        positions=positions,
        vocab_size=130,
        num_classes=4,
        micro_batch_size=3,
        multiple=multiple,
        context_parallel_size=3,
        context_parallel_rank=2,
        length=9,
        packed=packed,
    )
