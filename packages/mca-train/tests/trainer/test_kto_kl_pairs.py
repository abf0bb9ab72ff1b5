import numpy as np

from mca_train import TokenDataset
from mca_train.batching.collate import PadCollator, StepCollator
from mca_train.batching.sampling import CountedSamples
from mca_train.data.token_dataset import describe_order
from mca_train.trainer.dpo import ExtraColumns
from mca_train.trainer.kto import KtoKlPairs


def samples(count):
    rows = [([10 * n, 10 * n + 1, 10 * n + 2], [False, False, True]) for n in range(1, count + 1)]
    return TokenDataset.from_samples(rows)


def others(count, group):
    made = KtoKlPairs(samples(count), group, None)
    return [made[index]["other_input_ids"].tolist() for index in range(len(made))]


def test_answers_go_round_within_a_group():
    assert others(4, 2) == [[10, 11, 22], [20, 21, 12], [30, 31, 42], [40, 41, 32]]
    assert others(3, 2) == [[10, 11, 22], [20, 21, 12], [30, 31, 22]]  # none has its own
    assert others(7, 4)[4:] == [[50, 51, 72], [60, 61, 52], [70, 71, 62]]  # a smaller group at the end


def test_answers_to_one_prompt_are_not_exchanged():
    def answers(prompts, group):
        rows = [([prompt, number], [False, True]) for number, prompt in enumerate(prompts)]
        made = KtoKlPairs(TokenDataset.from_samples(rows), group, None)
        return [int(made[index]["other_input_ids"][1]) for index in range(len(made))]

    assert answers([50, 50, 60, 60], 4) == [2, 3, 0, 1]
    assert answers([50, 50, 50, 60], 4) == [3, 0, 1, 2]  # there is none without
    assert answers([60, 50, 70, 70, 60, 50, 50], 3) == [2, 0, 1, 5, 3, 4, 4]


def test_a_step_has_the_others_beside_it_in_as_many_micro_batches():
    dataset = CountedSamples(KtoKlPairs(samples(4), 4, None))
    for packed in (False, True):
        collator = StepCollator(collate=PadCollator(0), micro_batch_size=2, packed=packed)
        step = collator([dataset[index] for index in (0, 1, 2, ~0)])
        assert step.kl_batch is not None
        assert len(step.kl_batch.micro_batches) == len(step.micro_batches) == 2
        first, second = step.kl_batch.micro_batches
        assert first.input_ids.flatten().tolist() == [10, 11, 42, 20, 21, 12]
        assert second.loss_mask.sum() == 1  # what does not count, does not here either


def test_what_has_more_of_each_sample_comes_in_the_same_order():
    dataset = samples(2)
    dataset.order_description = "rows of a.jsonl"
    for made in (KtoKlPairs(dataset, 2, None), ExtraColumns(dataset, np.zeros((2, 1)))):
        assert describe_order(made) == "rows of a.jsonl"


def test_a_column_is_appended_to_the_values_of_its_sequence():
    twice = ExtraColumns(ExtraColumns(samples(2), np.array([[1.0], [2.0]])), np.array([[3.0], [4.0]]))
    assert [twice[index]["values"].tolist() for index in (0, 1)] == [[1, 3], [2, 4]]
