"""Files that are streamed give the samples that files in memory do."""

import json

import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.arguments import DataArguments
from mca_train.data import load_tokenized
from mca_train.settings import parse
from mca_train.streams import load_stream

ROWS = [
    {
        "text": f"row {n} " + "x" * (n % 7),
        "prompt": f"{n}+1=",
        "completion": str(n + 1),
        "chosen": str(n + 1),
        "rejected": "no" * n,
    }
    for n in range(1, 30)
]


@pytest.fixture
def files(tmp_path):
    halves = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, rows in zip(halves, (ROWS[:20], ROWS[20:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in halves]


def arguments(**changes):
    return DataArguments(model_name_or_path="m", streaming=True, seq_length=16, **changes)


@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo"])
def test_samples_are_those_of_files_in_memory(kind, files):
    tokenizer = byte_tokenizer()
    stream = list(load_stream(kind, files, tokenizer, arguments(), seed=None))
    whole = load_tokenized(kind, files, tokenizer, arguments())
    assert len(stream) == len(whole) > 15
    for number, sample in enumerate(stream):
        for name, values in sample.items():
            assert values.tolist() == whole[number][name].tolist()


def test_the_order_is_drawn_anew_in_each_pass_and_is_the_same_again(files):
    def order(epoch):
        stream = load_stream("sft", files, byte_tokenizer(), arguments(shuffle_buffer_size=10), seed=3)
        stream.set_epoch(epoch)
        return [tuple(sample["input_ids"].tolist()) for sample in stream]

    first, second = order(0), order(1)
    assert first == order(0) != second
    assert sorted(first) == sorted(second)


def test_rows_of_others_are_not_tokenized(files):
    from mca_train.sampling import BatchShape
    from mca_train.stream_steps import StepStream

    stream = load_stream("sft", files, byte_tokenizer(), arguments(), seed=None)
    made = []
    shape = BatchShape(micro_batch_size=1, num_micro_batches=2, data_parallel_size=2, data_parallel_rank=1)
    steps = StepStream(stream.rows, shape, 4, make=lambda row: made.append(row["prompt"]) or row)
    steps.set_epoch(0, 4)
    assert [[counts for _, counts in step] for step in steps] == [[True, True]] * 3
    assert made == ["6+1=", "8+1=", "10+1=", "12+1=", "14+1=", "16+1="]


def test_a_stream_needs_max_steps(tmp_path):
    values = {"model_name_or_path": "m", "train_file": "f", "output_dir": str(tmp_path), "streaming": True}
    with pytest.raises(McaError, match="streaming needs max_steps"):
        parse(values, "run.yaml")


def test_wrong_columns_and_empty_files_are_told_before_training(files, tmp_path):
    with pytest.raises(McaError, match=r"no column .words. .* set text_column"):
        load_stream("pretrain", files, byte_tokenizer(), arguments(text_column="words"), seed=None)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(McaError, match="is empty"):
        load_stream("sft", [str(empty)], byte_tokenizer(), arguments(), seed=None)
