import json

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from tokenizers_for_tests import CHATML, MARKED, OPENS_THOUGHT, REASONING, THINKING, byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.data.chat import tokenize_chat
from mca_train.data.encoding import check_messages, tokenize_answer
from mca_train.data.files import load_rows, open_dataset
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def arguments(**changes):
    return PairArguments(model_name_or_path="m", **changes)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def targets(tokenizer, tokens, mask):
    return tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])


def sample(tokenizer, dataset, index):
    item = dataset[index]
    kept = item["input_ids"][item["labels"] != -100]
    return tokenizer.decode(item["input_ids"]), tokenizer.decode(kept)


def test_pretrain_joins_texts_with_eos_and_keeps_every_token(tmp_path):
    tokenizer = byte_tokenizer()
    file = jsonl(tmp_path / "a.jsonl", [{"text": "abcde"}, {"text": ""}, {"text": "fgh"}])
    blocks = load_tokenized(TASKS["pretrain"], [file], tokenizer, arguments(seq_length=4))
    assert blocks.lengths.tolist() == [4, 4, 2]
    joined = "".join(tokenizer.decode(blocks[i]["input_ids"]) for i in range(3))
    assert joined == "abcde<|eos|>fgh<|eos|>"
    assert (blocks[0]["labels"] == blocks[0]["input_ids"]).all()


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "txt"])
def test_other_file_types_read_the_same(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    rows = datasets.Dataset.from_dict({"text": ["one\ntwo"]})
    if suffix == "parquet":
        rows.to_parquet(str(file))
    elif suffix == "arrow":
        rows.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(file)
    else:
        file.write_text("one\ntwo")
    tokenizer = byte_tokenizer()
    blocks = load_tokenized(TASKS["pretrain"], [str(file)], tokenizer, arguments(seq_length=64))
    assert tokenizer.decode(blocks[0]["input_ids"]) == "one\ntwo<|eos|>"


def test_prompt_and_completion_train_on_the_completion_only(tmp_path):
    tokenizer = byte_tokenizer()
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    data = load_tokenized(TASKS["sft"], [file], tokenizer, arguments())
    assert sample(tokenizer, data, 0) == ("2+2=4<|eos|>", "4<|eos|>")


TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, "hello<|im_end|>\nciao<|im_end|>\n"),
        (THINKING, "hello<|im_end|>\n<think>\n\n</think>\n\nciao<|im_end|>\n"),
    ],
)
def test_every_assistant_turn_is_a_target_and_nothing_else(template, answers):
    tokenizer = byte_tokenizer(template)
    tokens, mask = tokenize_chat(tokenizer, TURNS)
    assert targets(tokenizer, tokens, mask) == answers
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(tokens) == rendered


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
THOUGHTS = [
    {"role": "user", "content": "hi"},
    CALL,
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "<think>a</think>hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "<think>b</think>ciao"},
]


@pytest.mark.parametrize(
    ("template", "last"), [(REASONING, "<think>b</think>ciao"), (OPENS_THOUGHT, "b</think>ciao")]
)
def test_turns_that_the_template_rewrites_and_calls_of_tools_are_targets(template, last):
    tokenizer = byte_tokenizer(template)
    tokens, mask = tokenize_chat(tokenizer, THOUGHTS)
    assert (
        targets(tokenizer, tokens, mask) == f"<call>f</call><|im_end|>\nhello<|im_end|>\n{last}<|im_end|>\n"
    )
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(THOUGHTS, tokenize=False)
    tokens, mask = tokenize_chat(tokenizer, THOUGHTS[:4], first=3)
    assert targets(tokenizer, tokens, mask).endswith("a</think>hello<|im_end|>\n")


def test_a_template_that_marks_answers_is_followed_as_by_transformers():
    tokenizer = byte_tokenizer(MARKED)
    tokens, mask = tokenize_chat(tokenizer, TURNS)
    theirs = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert (tokens, mask) == (theirs["input_ids"], [bool(one) for one in theirs["assistant_masks"]])
    assert targets(tokenizer, tokens, mask) == "hello;ciao;"
    tokens, mask = tokenize_chat(tokenizer, TURNS, first=2)
    assert targets(tokenizer, tokens, mask) == "ciao;"


@pytest.mark.parametrize("as_text", [False, True])
def test_the_template_is_told_of_a_rows_tools(tmp_path, as_text):
    tokenizer = byte_tokenizer(REASONING)
    tools = [[{"name": "f", "arguments": {"x": "int"}}], [{"name": "g"}]]
    rows = [
        {"messages": TURNS[:2], "tools": json.dumps(some) if as_text else some} for some in [*tools, None]
    ]
    data = load_tokenized(TASKS["sft"], [jsonl(tmp_path / "a.jsonl", rows)], tokenizer, arguments())
    for number, some in enumerate([*tools, None]):
        text = tokenizer.apply_chat_template(TURNS[:2], tools=some, tokenize=False)
        assert sample(tokenizer, data, number) == (text, "<think></think>hello<|im_end|>\n")
    pair = {"prompt": TURNS[:1], "chosen": TURNS[1:2], "rejected": TURNS[3:], "tools": tools[0]}
    pairs = load_tokenized(TASKS["dpo"], [jsonl(tmp_path / "b.jsonl", [pair])], tokenizer, arguments())
    for side in ("chosen", "rejected"):
        text = tokenizer.apply_chat_template(pair["prompt"] + pair[side], tools=tools[0], tokenize=False)
        assert tokenizer.decode(pairs[0][f"{side}_input_ids"]) == text


def test_messages_of_a_file(tmp_path):
    tokenizer = byte_tokenizer()
    file = jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}, {"messages": TURNS[:2]}])
    data = load_tokenized(TASKS["sft"], [file], tokenizer, arguments())
    assert sample(tokenizer, data, 1)[1] == "hello<|im_end|>\n"


def test_conversational_prompt_is_context(tmp_path):
    tokenizer = byte_tokenizer()
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    data = load_tokenized(TASKS["sft"], [jsonl(tmp_path / "a.jsonl", [row])], tokenizer, arguments())
    assert sample(tokenizer, data, 0)[1] == "ciao<|im_end|>\n"


def test_rows_whose_answer_is_cut_off_are_dropped(tmp_path, caplog):
    rows = [{"prompt": "x" * 50, "completion": "y"}, {"prompt": "x", "completion": "y"}]
    data = load_tokenized(
        TASKS["sft"], [jsonl(tmp_path / "a.jsonl", rows)], byte_tokenizer(), arguments(seq_length=8)
    )
    assert len(data) == 1
    assert "1 of 2 rows do not have an answer within seq_length 8" in caplog.text
    assert "1 of 2 rows are longer than seq_length 8 and are truncated at the end" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("pretrain", "a.jsonl", '{"txt": "a"}\n', "no column 'text' (columns: txt); set text_column"),
        ("pretrain", "a.csv", "text\na\n", "ends in '.csv'; expected one of .jsonl"),
        ("pretrain", "a.jsonl", "", "is empty"),
        ("pretrain", "a.jsonl", "\n\n", "a.jsonl has no rows"),
        (
            "sft",
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a"}], "tools": "{"}\n',
            "tools is not valid JSON",
        ),
        (
            "sft",
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a"}], "tools": "[{}, 1]"}\n',
            "tools is [{}, 1]; expected a list of mappings",
        ),
        ("pretrain", "a.jsonl", '{"text": "a"\n', "cannot be read as json"),
        ("sft", "a.jsonl", '{"question": "a"}\n', "columns question; expected 'messages'"),
        ("sft", "a.jsonl", '{"prompt": "a", "completion": 3}\n', "row 0: prompt and completion must be text"),
        ("sft", "a.jsonl", '{"messages": []}\n', "row 0: messages must be a list of turns"),
        ("pretrain", "a.jsonl", '{"text": 1}\n', "train_file, row 0: text is 1; expected text"),
        ("pretrain", "a.jsonl", '{"text": ["a"]}\n', "row 0: text is ['a']; expected text"),
        ("pretrain", "a.jsonl", '{"text": null}\n', "1 of 1 rows have no text in column 'text'"),
        ("sft", "a.jsonl", '{"text": null}\n', "row 0: text is None; expected text"),
        ("sft", "a.jsonl", '{"prompt": [], "completion": "x"}\n', "so the completion must be; got 'x'"),
        (
            "sft",
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": null}]}\n',
            "row 0: messages, turn 0 (assistant): no content or tool_calls; add it",
        ),
        (
            "sft",
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}\n',
            "row 0: messages, turn 1 (assistant): no content or tool_calls; add it",
        ),
        (
            "sft",
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": ""}]}\n',
            "row 0: messages, turn 1 (assistant): no content or tool_calls; add it",
        ),
        (
            "sft",
            "a.jsonl",
            '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
            "rows of mca-train dpo or reward",
        ),
        ("dpo", "a.jsonl", '{"text": "a", "label": 1}\n', "; these are rows of mca-train classify"),
        (
            "sft",
            "a.jsonl",
            '{"question": "a"}\n',
            "(set messages_column or prompt_column or completion_column or",
        ),
        (
            "sft",
            "a.jsonl",
            '{"messages": [{"role": "user", "content": null}]}\n',
            "turn 0 (user): no content;",
        ),
        ("sft", "a.jsonl", '{"messages": [{"role": "user", "content": 7}]}\n', "content is 7; expected text"),
    ],
)
def test_bad_files_are_named(tmp_path, kind, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(McaError) as error:
        load_tokenized(TASKS[kind], [str(file)], byte_tokenizer(), arguments())
    assert message in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_several_files_must_go_together(tmp_path, streaming):
    rows = {
        "a": {"prompt": "a", "completion": "b", "id": 1},
        "other-id": {"prompt": "a", "completion": "b", "id": "x"},
        "number": {"prompt": "a", "completion": 7},
        "chat": {"messages": TURNS},
    }
    files = {name: jsonl(tmp_path / f"{name}.jsonl", [row] * 2) for name, row in rows.items()}

    def load(*names):
        given = [files[name] for name in names]
        if streaming:
            return list(load_stream(TASKS["sft"], given, byte_tokenizer(), arguments(), seed=None))
        return load_tokenized(TASKS["sft"], given, byte_tokenizer(), arguments())

    assert len(load("a", "other-id")) == 4
    with pytest.raises(McaError, match=r"train_file: the columns of .* cannot be combined: ") as error:
        load("a", "number")
    assert "\n" not in str(error.value)
    with pytest.raises(McaError, match="the same columns" if streaming else "messages must be a list"):
        load("a", "chat")


@pytest.mark.parametrize("streaming", [False, True])
def test_variables_of_the_template_are_kept_of_several_files(tmp_path, streaming):
    tokenizer = byte_tokenizer(CHATML.replace("{{ m['content'] }}", "{{ style }}{{ m['content'] }}"))
    variables = {"a": {"style": "kind"}, "b": {"style": "curt", "x": 1}, "number": {"style": 1}, "none": None}
    rows = {name: {"messages": TURNS, "chat_template_kwargs": given} for name, given in variables.items()}
    del rows["none"]["chat_template_kwargs"]
    files = {name: jsonl(tmp_path / f"{name}.jsonl", [row]) for name, row in rows.items()}

    def texts(*names):
        given = TASKS["sft"], [files[name] for name in names], tokenizer, arguments()
        found = load_stream(*given, seed=None) if streaming else load_tokenized(*given)
        return [tokenizer.decode(item["input_ids"]) for item in found]

    assert texts("a", "b") == texts("a") + texts("b")
    assert "kind" in texts("a")[0]
    with pytest.raises(McaError, match=r"cannot be combined: .*key style"):
        texts("a", "number")
    if streaming:
        with pytest.raises(McaError, match="must have the same columns"):
            texts("none", "a")
    else:
        assert texts("none", "a") == texts("none") + texts("a")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a[1].jsonl", "b*.jsonl", "[v1]/c.jsonl", "d?.jsonl", "e{1,2}].jsonl"])
def test_names_are_no_patterns(tmp_path, monkeypatch, name, streaming):
    """Files that they would match as patterns stand beside them, or none does."""
    (tmp_path / "[v1]").mkdir()
    for other in ("a1.jsonl", "b2.jsonl", "dd.jsonl"):
        jsonl(tmp_path / other, [{"prompt": "", "completion": "no"}] * 2)
    jsonl(tmp_path / name, [{"prompt": "", "completion": "yes"}])
    monkeypatch.chdir(tmp_path / "[v1]")
    load = (lambda *some: load_stream(*some, seed=None)) if streaming else load_tokenized
    for path in (str(tmp_path / name), f"../{name}"):
        samples = [*load(TASKS["sft"], [path], byte_tokenizer(), arguments())]
        assert [byte_tokenizer().decode(each["input_ids"]) for each in samples] == ["yes<|eos|>"]


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_a_local_file_sends_no_request(tmp_path, monkeypatch, streaming):
    requests = []
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr("datasets.load.get_session", lambda: requests.append("session"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    open_dataset("json", str(tmp_path / "a.jsonl"), {}, streaming=streaming)
    assert not requests


def test_missing_file_is_named(tmp_path):
    with pytest.raises(McaError, match=r"eval_file: file .*none\.jsonl does not exist"):
        load_tokenized(
            TASKS["sft"], [str(tmp_path / "none.jsonl")], byte_tokenizer(), arguments(), evaluation=True
        )


def test_evaluation_files_may_have_another_shape_than_what_is_trained_on(tmp_path):
    named = {"prompt_column": "question", "completion_column": "answer", "tools_column": "functions"}

    def load(row, **more):
        file = jsonl(tmp_path / "a.jsonl", [row])
        given = arguments(tokenized_cache=str(tmp_path / "cache"), **named)
        return load_tokenized(TASKS["sft"], [file], byte_tokenizer(), given, **more)[0]["input_ids"]

    asked = {"question": "1+1=", "answer": "2", "functions": None}
    for row, said in ((asked, "1+1=2"), ({"messages": TURNS}, TURNS[-1]["content"]), ({"text": "x"}, "x")):
        assert said in byte_tokenizer().decode(load(row, evaluation=True))
    with pytest.raises(McaError, match="eval_file: no column 'question', which prompt_column names"):
        load({"prompt": "1+1=", "messages": TURNS}, evaluation=True)
    with pytest.raises(McaError, match="eval_file: no column 'functions', which tools_column names"):
        load({"messages": TURNS, "tools": None}, evaluation=True)
    with pytest.raises(McaError, match="train_file: no column 'answer', which completion_column names"):
        load({"messages": TURNS})


def test_chat_without_a_template_says_so(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(McaError, match="has no chat template"):
        load_tokenized(TASKS["sft"], [file], byte_tokenizer(None), arguments())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_without_the_column_and_rows_without_text_are_told(tmp_path, caplog, streaming):
    rows = [{"text": "ab"}, {"text": None}]
    files = [jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "chat.jsonl", [{"messages": TURNS}])]

    def load(files):
        if streaming:
            return list(load_stream(TASKS["pretrain"], files, byte_tokenizer(), arguments(), seed=None))
        return load_tokenized(TASKS["pretrain"], files, byte_tokenizer(), arguments())

    with pytest.raises(McaError, match=r"train_file: .*chat\.jsonl: no column 'text' \(columns: messages\)"):
        load(files)
    assert len(load(files[:1])[0]["input_ids"]) == 3
    assert ("rows without text are left out" if streaming else "1 of 2 rows have no text") in caplog.text


def test_an_assistant_that_only_calls_tools_may_be_without_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert check_messages([call]) == [{key: value for key, value in call.items() if value is not None}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no way') }}",
        "{% if %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(McaError, match="the tokenizer's chat template cannot render them: "):
        tokenize_chat(byte_tokenizer(template), TURNS)


def test_the_line_of_a_wrong_template_is_named():
    with pytest.raises(
        McaError, match=r"cannot render them: line 2 of the template: .*; correct the template$"
    ):
        tokenize_chat(byte_tokenizer("{% for m in messages %}\n{{ m.role }: {% endfor %}"), TURNS)


def test_an_end_mark_of_a_prompt_stays_and_that_of_its_tokenizer_goes():
    tokenizer = byte_tokenizer()
    for _ in range(2):  # a tokenizer that adds none, then one that does
        for prompt in ("a", "a<|eos|>"):
            tokens, targets = tokenize_answer(tokenizer, prompt, "b", 16)
            assert tokenizer.decode(tokens) == f"{prompt}b<|eos|>"
            assert sum(targets) == 2
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|eos|>", special_tokens=[("<|eos|>", tokenizer.eos_token_id)]
        )


def test_the_first_rows_of_all_files_are_kept_up_to_a_limit(tmp_path):
    files = [
        jsonl(tmp_path / "a.jsonl", [{"text": "0"}, {"text": "1"}]),
        jsonl(tmp_path / "b.jsonl", [{"text": "2"}, {"text": "3"}]),
    ]
    for limit, count in ((None, 4), (1, 1), (3, 3), (4, 4), (9, 4)):
        rows = load_rows(files, "train_file", arguments(), limit)
        assert rows["text"] == ["0", "1", "2", "3"][:count], limit
