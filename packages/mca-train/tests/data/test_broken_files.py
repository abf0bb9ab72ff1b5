"""Files that are broken in every way: one line that names the file or the row, in memory and streamed; no traceback."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.files import translate_read_errors
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized

ROWS = [{"text": f"row {n}", "prompt": f"{n}=", "completion": str(n)} for n in range(24)]
LINES = [json.dumps(row).encode() for row in ROWS]
WHOLE = b"\n".join(LINES) + b"\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def with_line(line, number=20):
    return b"\n".join([*LINES[:number], line, *LINES[number + 1 :]]) + b"\n"


def parquet(broken_text=False):
    table = pa.Table.from_pylist(ROWS)
    if broken_text:
        words = pa.array([b"\xff\xfe", *[b"ok"] * 23], type=pa.binary())
        table = table.set_column(0, "text", pa.Array.from_buffers(pa.string(), 24, words.buffers()))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=6, compression="zstd")
    return sink.getvalue().to_pybytes()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def nested(depth, number=0):
    return with_line(b'{"text": "a", "x": ' + b"[" * depth + b"]" * depth + b"}", number)


PARQUET = parquet()
READABLE = {
    "whole.jsonl": WHOLE,
    "byte order mark.jsonl": b"\xef\xbb\xbf" + WHOLE,
    "carriage returns.jsonl": WHOLE.replace(b"\n", b"\r\n"),
    "blank lines.jsonl": b"\n\n".join(LINES),
    "array.json": b"[" + b",".join(LINES) + b"]",
    "whole.parquet": PARQUET,
}
BROKEN = {
    "not closed.jsonl": (WHOLE + b'{"text": "cut', "cannot be read as json"),
    "no comma.jsonl": (
        with_line(b'{"text": "a" "b"}'),
        "cannot be read as json: line 21: JSON parse error: Missing a comma or '}' after an object member; repair",
    ),
    "types.jsonl": (b'{"text": "a"}\n{"text": 3}\n{"a" 3}\n', "as json: line 3: No ':' found when decoding"),
    "words.jsonl": (b"hello world\n", "cannot be read as json: line 1: "),
    "bytes.jsonl": (with_line(b'{"text": "\xff\xfe"}'), "can't decode byte 0xff"),
    "half a letter.jsonl": (with_line(b'{"text": "\\ud800"}'), "surrogate pair"),
    "nul.jsonl": (with_line(b'{"text": "a\0"}'), "cannot be read as json"),
    "zeros.jsonl": (b"\0" * 999, ""),
    "sixteen bits.jsonl": (WHOLE.decode().encode("utf-16"), "cannot be read as json"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n\n\n", ""),
    "empty list.json": (b"[]", ""),
    "deep.jsonl": (nested(100_000, 3), "row 3: nested more than 256 deep; leave the row out"),
    "numbers.jsonl": (b"1\n2\n", ""),
    "number.jsonl": (with_line(b'{"text": 3}'), ""),
    "truncated.parquet": (PARQUET[: len(PARQUET) // 2], "cannot be read as parquet"),
    "flipped.parquet": (flipped(PARQUET, 40), ""),
    "flipped footer.parquet": (flipped(PARQUET, len(PARQUET) - 300), ""),
    "other.parquet": (WHOLE, "cannot be read as parquet"),
    "bytes.parquet": (parquet(broken_text=True), "can't decode byte 0xff"),
    "other.arrow": (WHOLE, "cannot be read as arrow"),
    "bytes.txt": (b"ok\xff", "can't decode byte 0xff"),
}


def read(file, streaming):
    arguments = DataArguments(model_name_or_path="m", streaming=streaming, seq_length=32)
    if streaming:
        found = list(load_stream(TASKS["pretrain"], [str(file)], byte_tokenizer(), arguments, seed=None))
    else:
        found = load_tokenized(TASKS["pretrain"], [str(file)], byte_tokenizer(), arguments)
    return [found[number]["input_ids"].tolist() for number in range(len(found))]


@pytest.mark.parametrize("name", READABLE)
def test_files_of_every_spelling_give_the_same_samples(name, tmp_path):
    (tmp_path / name).write_bytes(READABLE[name])
    (tmp_path / "plain.jsonl").write_bytes(WHOLE)
    assert (
        read(tmp_path / name, False) == read(tmp_path / name, True) == read(tmp_path / "plain.jsonl", False)
    )


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line_that_names_it(name, streaming, tmp_path):
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(McaError) as error:
        read(tmp_path / name, streaming)
    reported = str(error.value)
    assert reported.startswith("train_file")
    assert name in reported or ", row " in reported
    assert reason in reported
    assert "\n" not in reported
    assert len(reported) < 500


@pytest.mark.parametrize(
    "reason",
    [
        "JSON parse error: Column(/text) changed from string to number in row 1",
        "Failed to parse string: 'x' as a scalar of type int64",
    ],
)
def test_an_error_about_types_names_no_damaged_line(reason, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": 3}\n{')
    with pytest.raises(McaError) as error, translate_read_errors("train_file", str(file), "json"):
        raise ValueError(reason)
    assert str(error.value).endswith(f"cannot be read as json: {reason}; repair or replace the file")


def test_a_file_that_changes_or_disappears_between_passes_is_reported(tmp_path, caplog):
    file = tmp_path / "a.jsonl"
    file.write_bytes(WHOLE)
    arguments = DataArguments(model_name_or_path="m", streaming=True, seq_length=32)
    stream = load_stream(TASKS["sft"], [str(file)], byte_tokenizer(), arguments, seed=1)
    assert len(list(stream)) == 24
    file.write_bytes(b"\n".join(LINES[:9]))
    assert len(list(stream)) == 9
    assert f"{file} has changed since the run began" in caplog.text
    file.write_bytes(with_line(b"{", 5))
    with pytest.raises(McaError, match=r"cannot be read as json: .*; repair or replace the file"):
        list(stream)
    file.unlink()
    with pytest.raises(McaError, match=f"{file} is not there any more"):
        list(stream)


class Counting:
    """A tokenizer that notes how long the texts were that it got."""

    def __init__(self):
        self.whole, self.longest = byte_tokenizer(), 0

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def __call__(self, text, **options):
        self.longest = max([self.longest, *map(len, [text] if isinstance(text, str) else text)])
        return self.whole(text, **options)


@pytest.mark.cases(0, always=["text"])
@pytest.mark.parametrize("row", ["text", "completion", "messages"])
def test_of_a_long_row_only_what_is_trained_on_is_tokenized(row, tmp_path):
    long = "ab c" * 100_000
    answer = [{"role": "user", "content": "q"}, {"role": "assistant", "content": long}]
    rows = {
        "text": {"text": long},
        "completion": {"prompt": "q", "completion": long},
        "messages": {"messages": answer},
    }
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(rows[row]) + "\n")
    arguments = DataArguments(model_name_or_path="m", seq_length=64)
    tokenizer = Counting()
    found = load_tokenized(TASKS["sft"], [str(file)], tokenizer, arguments)
    assert tokenizer.longest < 40_000
    assert found[0]["input_ids"].tolist() == whole_sample(rows[row])[:64]


def whole_sample(row):
    tokenizer = byte_tokenizer()
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    return tokenizer(row.get("prompt", "") + row.get("completion", row.get("text", "")))["input_ids"]


def test_pieces_of_a_text_are_tokenized_as_the_whole():
    from mca_train.data.long_texts import split_text

    text = "some words\nof every  length " * 400
    tokenizer = byte_tokenizer()
    cut = list(split_text(tokenizer, text, size=1000))
    assert "".join(cut) == text
    assert 5 < len(cut) < 12
    assert [token for piece in cut for token in tokenizer(piece)["input_ids"]] == tokenizer(text)["input_ids"]
    assert list(split_text(tokenizer, "a" * 5000, size=1000)) == ["a" * 5000]
