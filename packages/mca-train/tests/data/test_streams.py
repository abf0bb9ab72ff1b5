"""Files that are streamed give the samples that files in memory do."""

import json
from traceback import clear_frames

import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.run.rules import check
from mca_train.run.settings import make_settings
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized

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
    return PairArguments(model_name_or_path="m", streaming=True, seq_length=16, **changes)


@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo"])
def test_samples_are_those_of_files_in_memory(kind, files):
    tokenizer = byte_tokenizer()
    stream = list(load_stream(TASKS[kind], files, tokenizer, arguments(), seed=None))
    whole = load_tokenized(TASKS[kind], files, tokenizer, arguments())
    assert len(stream) == len(whole) > 15
    assert whole.order_description == "rows of a.jsonl, b.jsonl"
    for number, sample in enumerate(stream):
        for name, values in sample.items():
            assert values.tolist() == whole[number][name].tolist()


def test_the_order_is_drawn_anew_in_each_pass_and_is_the_same_again(files):
    def order(epoch):
        stream = load_stream(TASKS["sft"], files, byte_tokenizer(), arguments(shuffle_buffer_size=10), seed=3)
        stream.set_epoch(epoch)
        return [tuple(sample["input_ids"].tolist()) for sample in stream]

    first, second = order(0), order(1)
    assert first == order(0) != second
    assert sorted(first) == sorted(second)


def test_a_stream_says_what_its_order_comes_from(files, tmp_path, monkeypatch):
    def words(kind="sft", names=files, seed=3, **changes):
        return load_stream(
            TASKS[kind], names, byte_tokenizer(), arguments(**changes), seed=seed
        ).order_description

    assert words() == "rows of a.jsonl, b.jsonl, drawn from a buffer of 1000 by seed 3"
    assert words(seed=None) == words(shuffle_buffer_size=1) == "rows of a.jsonl, b.jsonl, not shuffled"
    assert words("pretrain", max_train_samples=5, seed=None) == (
        "blocks of 16 tokens of the first 5 rows of a.jsonl, b.jsonl, not shuffled"
    )
    others = [
        words(),
        words("dpo", seed=4),
        words(names=files[::-1]),
        words(shuffle_buffer_size=9),
        words(max_train_samples=5),
    ]
    assert len(set(others)) == 5
    monkeypatch.chdir(tmp_path)
    assert words(names=["a.jsonl", "./b.jsonl"]) == words(), "the same files, by other paths"


def test_many_files_are_told_apart_by_a_digest():
    from mca_train.data.urls import describe_files

    names = [f"s3://bucket/{number}.jsonl" for number in range(20)]
    assert describe_files(["https://host/a.jsonl?token=secret", "/x/b.jsonl"]) == "a.jsonl, b.jsonl"
    assert describe_files(names).startswith("0.jsonl, ..., 19.jsonl (20 files, ")
    assert describe_files(names) == describe_files([name.replace("s3://bucket", "/data") for name in names])
    assert describe_files(names) != describe_files([names[0], names[2], names[1], *names[3:]])


def test_rows_of_others_are_not_tokenized(files):
    from mca_train.batching.sampling import BatchShape, StepStream

    stream = load_stream(TASKS["sft"], files, byte_tokenizer(), arguments(), seed=None)
    made = []
    shape = BatchShape(micro_batch_size=1, num_micro_batches=2, data_parallel_size=2, data_parallel_rank=1)
    steps = StepStream(stream.rows, shape, 4, make=lambda row: made.append(row["prompt"]) or row)
    steps.set_epoch(0, 4)
    assert [[counts for _, counts in step] for step in steps] == [[True, True]] * 3
    assert made == ["6+1=", "8+1=", "10+1=", "12+1=", "14+1=", "16+1="]


def test_a_stream_needs_max_steps(tmp_path):
    values = {"model_name_or_path": "m", "train_file": "f", "output_dir": str(tmp_path), "streaming": True}
    settings = make_settings(TASKS["sft"], values, "run.yaml")
    assert "streaming needs max_steps: a stream has no length" in check(TASKS["sft"], settings).impossible


def test_wrong_columns_and_empty_files_are_told_before_training(files, tmp_path):
    with pytest.raises(McaError, match=r"no column .words. .* set text_column"):
        load_stream(TASKS["pretrain"], files, byte_tokenizer(), arguments(text_column="words"), seed=None)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(McaError, match="is empty"):
        load_stream(TASKS["sft"], [str(empty)], byte_tokenizer(), arguments(), seed=None)


UNANSWERED = {
    "sft": [{"prompt": "p" * 16, "completion": "late"}, {"prompt": "", "completion": ""}],
    "dpo": [{"prompt": "p" * 16, "chosen": "a", "rejected": "b"}],
}
OTHERS = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "text": "t"}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rows_without_a_target_are_left_out_and_counted(kind, tmp_path, caplog):
    """Treat streams like files in memory, also where other rows would fill the step, packed or not."""
    rows = [OTHERS | row for row in (*ROWS[:3], *UNANSWERED[kind], *ROWS[3:5])]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = load_stream(TASKS[kind], [str(file)], byte_tokenizer(), arguments(), seed=None)
    whole = load_tokenized(TASKS[kind], [str(file)], byte_tokenizer(), arguments())
    caplog.clear()
    for _ in range(2):
        samples = list(stream)
        assert [{k: v.tolist() for k, v in sample.items()} for sample in samples] == [
            {k: v.tolist() for k, v in whole[number].items()} for number in range(len(whole))
        ]
    (reported,) = [record.getMessage() for record in caplog.records]
    assert f"within seq_length 16 and are left out: {len(rows) - len(whole)} of {len(rows)} rows" in reported
    file.write_text("".join(json.dumps(OTHERS | row) + "\n" for row in UNANSWERED[kind]))
    stream = load_stream(TASKS[kind], [str(file)], byte_tokenizer(), arguments(shuffle_buffer_size=4), seed=1)
    for read in (stream.rows.require_target, lambda: list(stream)):
        with pytest.raises(
            McaError, match=r"within seq_length 16: all \d rows?; raise seq_length, or look at"
        ):
            read()


def test_a_stream_is_read_up_to_its_first_target(tmp_path):
    rows = [*UNANSWERED["sft"], *ROWS[:2], {"prompt": None, "completion": "wrong"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = load_stream(
        TASKS["sft"], [str(file)], byte_tokenizer(), arguments(shuffle_buffer_size=4), seed=1
    )
    stream.rows.require_target()
    with pytest.raises(McaError, match="train_file, row 4: "):
        list(stream)


def test_short_rows_are_known_to_have_a_target_without_tokenizing_them():
    from mca_train.data.streams import pair_target_check, sft_target_check

    sure = sft_target_check(byte_tokenizer(), _of_length(4096))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert sure({"prompt": "a" * 1500, "completion": ""})
    assert sure({"text": "a"})
    assert sure({"messages": turns})
    for row in (
        {"prompt": "a" * 4000, "completion": "b"},
        {"prompt": "\ufdfa" * 1000, "completion": "b"},
        {"text": " "},
        {"messages": turns[:1]},
        {"messages": [{"role": "user", "content": "a" * 4000}, *turns]},
        {"messages": turns, "tools": [{}]},
        {"messages": turns, "completion": "b", "prompt": "a" * 4000},
    ):
        assert not sure(row)
    assert pair_target_check(_of_length(4096))({"prompt": "a", "chosen": "b", "rejected": "c"})


def _of_length(length):
    return PairArguments(model_name_or_path="m", streaming=True, seq_length=length)


@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo"])
def test_errors_name_the_row_of_the_file_whatever_the_order(kind, tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    broken = dict.fromkeys(OTHERS, None) | {"text": None, "completion": None}
    bad = [*ROWS[:4], broken] if kind != "pretrain" else ROWS[:4]
    files[1].write_text("".join(json.dumps(row) + "\n" for row in bad))
    names = [str(file) for file in files]
    stream = load_stream(TASKS[kind], names, byte_tokenizer(), arguments(shuffle_buffer_size=7), seed=1)
    if kind == "pretrain":
        assert {row.place for row in stream.rows} >= {f"row 3 of {files[1]}", f"row 19 of {files[0]}"}
        return
    with pytest.raises(McaError, match=f"^train_file, row 4 of {files[1]}: "):
        list(stream)


def test_an_error_of_a_worker_is_one_line(tmp_path):
    from torch.utils.data import DataLoader

    from mca_train.batching.sampling import BatchShape, StepStream
    from mca_train.trainer.loaders import iterate_steps

    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": 3}\n')
    stream = load_stream(TASKS["sft"], [str(file)], byte_tokenizer(), arguments(), seed=None)
    shape = BatchShape(micro_batch_size=1, num_micro_batches=1, data_parallel_size=1, data_parallel_rank=0)
    steps = StepStream(stream.rows, shape, 4, make=stream.make)
    with pytest.raises(McaError) as error:
        list(iterate_steps(DataLoader(steps, batch_size=None, collate_fn=list, num_workers=1)))
    for each in (error.value, error.value.__cause__):
        clear_frames(each.__traceback__)  # the loader, or a later search for garbage waits 5 s for its worker
    assert str(error.value) == "train_file, row 0: prompt and completion must be text; got 'a' and 3"


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_file_of_several_with_other_columns_is_an_error(odd, tmp_path):
    files = []
    for number in range(3):
        row = {"prompt": "1+1=", "completion": "2", "other": number}
        if number == odd:
            row["response"] = row.pop("completion")
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps(row) + "\n")
    with pytest.raises(McaError, match=rf"all files must have the same columns \(.*{odd}.jsonl: prompt[;)]"):
        load_stream(TASKS["sft"], [*map(str, files)], byte_tokenizer(), arguments(), seed=None)
