"""Rows in other programs' shapes train on what the same conversation as messages trains on."""

import json

import datasets
import fsspec
import pytest
from tokenizers_for_tests import REASONING, byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def turns(*texts):
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def shared(*texts):
    roles = ("human", "gpt") * len(texts)
    return [{"from": role, "value": text} for role, text in zip(roles, texts, strict=False)]


SYSTEM = {"role": "system", "content": "be kind"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
SAME = {
    "alpaca": ({"instruction": "say", "input": "hi", "output": "hi"}, {"messages": turns("say\nhi", "hi")}),
    "alpaca-history": (
        {"instruction": "c", "output": "d", "system": "be kind", "history": [["a", "b"]]},
        {"messages": [SYSTEM, *turns("a", "b", "c", "d")]},
    ),
    "sharegpt": ({"conversations": shared("a", "b", "c", "d")}, {"messages": turns("a", "b", "c", "d")}),
    "sharegpt-tools": (
        {"conversations": shared("a", "b"), "system": "be kind", "tools": json.dumps(TOOLS)},
        {"messages": [SYSTEM, *turns("a", "b")], "tools": TOOLS},
    ),
    "alpaca-tools": (
        {"instruction": "a", "output": "b", "tools": json.dumps(TOOLS)},
        {"messages": turns("a", "b"), "tools": TOOLS},
    ),
    "sharegpt-system": (
        {"conversations": [{"from": "system", "value": "be kind"}, *shared("a", "b")], "system": "be curt"},
        {"messages": [SYSTEM, *turns("a", "b")]},
    ),
    "sharegpt-weights": (
        {
            "conversations": [
                {**turn, "weight": weight}
                for turn, weight in zip(shared("a", "b", "c", "d"), (None, 0.0, 0.0, 1.0), strict=True)
            ]
        },
        {
            "messages": [
                {**turn, "weight": weight}
                for turn, weight in zip(turns("a", "b", "c", "d"), (1, 0, 0, 1), strict=True)
            ]
        },
    ),
    "sharegpt-roles": ({"conversation": turns("a", "b")}, {"messages": turns("a", "b")}),
}
SAME_PAIRS = {
    "alpaca": (
        {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
        {"prompt": turns("a"), "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
    ),
    "sharegpt": (
        {"conversations": shared("a"), "chosen": shared("", "b")[1], "rejected": shared("", "c")[1]},
        {"prompt": turns("a"), "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
    ),
}


def written(path, row):
    path.write_text(json.dumps(row) + "\n")
    return [str(path)]


def samples(kind, path, row, *, stream=False, **changes):
    arguments = PairArguments(model_name_or_path="m", seq_length=256, **changes)
    load = (lambda *some: load_stream(*some, seed=None)) if stream else load_tokenized
    found = load(TASKS[kind], written(path, row), byte_tokenizer(REASONING), arguments)
    return [{name: values.tolist() for name, values in sample.items()} for sample in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", SAME)
def test_a_shape_is_found_by_its_columns(case, stream, tmp_path):
    given, plain = SAME[case]
    found = samples("sft", tmp_path / "given.jsonl", given, stream=stream)
    assert found == samples("sft", tmp_path / "plain.jsonl", plain)
    assert any(label != -100 for label in found[0]["labels"])


@pytest.mark.parametrize("case", SAME_PAIRS)
def test_pairs_too(case, tmp_path):
    given, plain = SAME_PAIRS[case]
    found = samples("dpo", tmp_path / "given.jsonl", given)
    assert found == samples("dpo", tmp_path / "plain.jsonl", plain)


def test_a_shape_that_is_named_wins_over_columns(tmp_path):
    row = SAME["alpaca"][0] | {"messages": turns("x", "y"), "text": "z"}
    named = samples("sft", tmp_path / "a.jsonl", row, data_format="alpaca")
    assert named == samples("sft", tmp_path / "b.jsonl", SAME["alpaca"][0])
    assert samples("sft", tmp_path / "c.jsonl", row) == samples(
        "sft", tmp_path / "d.jsonl", {"messages": turns("x", "y")}
    )
    text = samples("sft", tmp_path / "e.jsonl", row, data_format="text")
    assert text == samples("sft", tmp_path / "f.jsonl", {"text": "z"})


SEVERAL = {"messages": turns("x", "y"), "question": "q", "answer": "a", "other": "b", "text": "z"}
TOOL_ROW = {"conversations": shared("a", "b"), "functions": json.dumps(TOOLS), "tools": None}
NAMED = {
    "prompt-over-messages": (
        SEVERAL,
        {"prompt_column": "question", "completion_column": "answer"},
        {"prompt": "q", "completion": "a"},
    ),
    "one-of-two": (
        SEVERAL | {"prompt": "p"},
        {"completion_column": "other"},
        {"prompt": "p", "completion": "b"},
    ),
    "text-over-messages": (SEVERAL, {"text_column": "text"}, {"text": "z"}),
    "alpaca-answer": (
        {"instruction": "q", "output": "old", "other": "new"},
        {"completion_column": "other"},
        {"messages": turns("q", "new")},
    ),
    "tools": (TOOL_ROW, {"tools_column": "functions"}, {"messages": turns("a", "b"), "tools": TOOLS}),
    "another-shape-of-the-run": (
        {"messages": turns("x", "y")},
        {"messages_column": "messages", "prompt_column": "question", "completion_column": "answer"},
        {"messages": turns("x", "y")},
    ),
}
NAMED_IN_PAIRS = {
    "alpaca": (
        {"instruction": "q", "chosen": "old", "rejected": "bad", "new": "good"},
        {"chosen_column": "new"},
        {"prompt": turns("q"), "chosen": turns("", "good")[1:], "rejected": turns("", "bad")[1:]},
    ),
    "sharegpt": (
        {"conversations": shared("q"), "chosen": shared("", "a")[1], "rejected": shared("", "b")[1]},
        {"chosen_column": "rejected", "rejected_column": "chosen"},
        {"prompt": turns("q"), "chosen": turns("", "b")[1:], "rejected": turns("", "a")[1:]},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", NAMED)
def test_columns_that_were_named_win_over_those_that_are_there(case, stream, tmp_path):
    given, named, plain = NAMED[case]
    found = samples("sft", tmp_path / "given.jsonl", given, stream=stream, **named)
    assert found == samples("sft", tmp_path / "plain.jsonl", plain)


@pytest.mark.parametrize("case", NAMED_IN_PAIRS)
def test_pairs_have_the_answers_that_were_named(case, tmp_path):
    given, named, plain = NAMED_IN_PAIRS[case]
    found = samples("dpo", tmp_path / "given.jsonl", given, **named)
    assert found == samples("dpo", tmp_path / "plain.jsonl", plain)


@pytest.mark.parametrize(
    ("kind", "row", "named", "message"),
    [
        (
            "sft",
            SEVERAL,
            {"prompt_column": "qestion"},
            "no column 'qestion', which prompt_column names (columns: messages, question, answer, other, text; format "
            "found: messages); correct prompt_column, or remove it",
        ),
        (
            "sft",
            SEVERAL,
            {"prompt_column": "question"},
            "prompt_column 'question' is of format prompt_completion, which needs a column 'completion' too (columns: "
            "messages, question, answer, other, text; format found: messages); set completion_column, or remove "
            "prompt_column",
        ),
        (
            "sft",
            SEVERAL,
            {"messages_column": "messages", "text_column": "text"},
            "no format reads messages_column 'messages' and text_column 'text' (columns: messages, question, answer, "
            "other, text; format found: messages); set data_format",
        ),
        (
            "sft",
            SAME["alpaca"][0],
            {"completion_column": "gtp4"},
            "no column 'gtp4', which completion_column",
        ),
        (
            "sft",
            SAME["alpaca"][0],
            {"completion_column": "gtp4", "data_format": "alpaca"},
            "columns instruction, input, output of data_format alpaca; expected",
        ),
        (
            "sft",
            {"instruction": "a", "gpt4": "b"},
            {"prompt_column": "question", "completion_column": "gpt4"},
            "completion_column 'gpt4' is of format prompt_completion, which needs a column 'question' too",
        ),
        (
            "sft",
            {"messages": turns("a", "b")},
            {"tools_column": "tools"},
            "no column 'tools', which tools_column",
        ),
        (
            "dpo",
            SAME_PAIRS["alpaca"][0],
            {"chosen_column": "new"},
            "no column 'new' (columns: instruction, input",
        ),
        (
            "dpo",
            SAME_PAIRS["alpaca"][0],
            {"prompt_column": "ask"},
            "no column 'ask', which prompt_column names (columns: instruction, input, chosen, rejected; format found: "
            "alpaca)",
        ),
        (
            "dpo",
            SAME_PAIRS["sharegpt"][0],
            {"tools_column": "fs"},
            "no column 'fs', which tools_column names",
        ),
    ],
)
def test_a_named_column_that_cannot_be_read_is_one_line(kind, row, named, message, tmp_path):
    with pytest.raises(McaError) as error:
        samples(kind, tmp_path / "a.jsonl", row, **named)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"conversations": [{"from": "bird", "value": "x"}]},
            "row 0: a turn is from 'bird'; expected one of human",
        ),
        ({"conversations": [{"who": "x"}]}, "row 0: a turn is {'who': 'x'}; expected 'from' and 'value'"),
        ({"conversations": "x"}, "row 0: conversations is 'x'; expected a list of turns"),
        ({"instruction": "a", "output": None}, "no content or tool_calls"),
        ({"question": "a"}, "columns question; expected 'messages'"),
    ],
)
def test_what_is_of_no_shape_is_one_line(row, message, tmp_path):
    with pytest.raises(McaError, match=message.replace("{", r"\{").replace("'", ".")):
        samples("sft", tmp_path / "a.jsonl", row)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_compressed_files_and_addresses_are_read_as_plain_ones(ending, stream, tmp_path):
    given, plain = SAME["sharegpt"]
    expected = samples("sft", tmp_path / "plain.jsonl", plain)
    file = tmp_path / f"given.jsonl{ending}"
    with fsspec.open(str(file), "wt", compression="infer") as opened:
        opened.write(json.dumps(given) + "\n")
    arguments = PairArguments(model_name_or_path="m", seq_length=256)
    load = (lambda *some: load_stream(*some, seed=None)) if stream else load_tokenized
    for name in (str(file), f"file://{file}"):
        (found,) = load(TASKS["sft"], [name], byte_tokenizer(REASONING), arguments)
        assert {key: values.tolist() for key, values in found.items()} == expected[0]


def test_deeply_nested_json_is_refused_in_a_compressed_file_too(tmp_path):
    file = tmp_path / "deep.jsonl.gz"
    with fsspec.open(str(file), "wt", compression="infer") as opened:
        opened.write('{"text": ' + "[" * 999 + "]" * 999 + "}\n")
    arguments = PairArguments(model_name_or_path="m")
    with pytest.raises(McaError, match="row 0: nested more than 256 deep"):
        load_tokenized(TASKS["sft"], [str(file)], byte_tokenizer(), arguments)
