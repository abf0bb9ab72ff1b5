"""Target tokens, with the tokenizers and templates of common models' kinds."""

import json

import datasets
import pytest
from tokenizers_for_tests import CHATML, MARKED, SPACED, SPACED_MARKED, byte_tokenizer, spaced_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import ClassifyArguments, DataArguments, PairArguments, RewardArguments
from mca_train.data.chat import tokenize_chat
from mca_train.data.encoding import check_messages, row_encoder, tokenize_answer, tokenize_answers
from mca_train.data.formats import row_converter
from mca_train.data.scoring import scored_pair_encoder, text_encoder
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_first, load_stream, load_tokenized

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ja nein"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "x"},
]


def learnt(tokenizer, encoded):
    tokens, targets = encoded
    return tokenizer.convert_ids_to_tokens(
        [token for token, is_one in zip(tokens, targets, strict=True) if is_one]
    )


@pytest.mark.parametrize("template", [SPACED, SPACED_MARKED])
def test_a_token_that_holds_the_space_before_an_answer_is_a_target(template):
    tokenizer = spaced_tokenizer(template)
    encoded = tokenize_chat(tokenizer, TURNS)
    assert learnt(tokenizer, encoded) == ["▁j", "a", "▁n", *"ein", "<|eos|>", "▁x", "<|eos|>"]
    tokenizer = spaced_tokenizer(SPACED_MARKED)
    theirs = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded == (theirs["input_ids"], [bool(one) for one in theirs["assistant_masks"]])


@pytest.mark.parametrize(
    ("prompt", "completion", "answer"),
    [("Q:", "4", ["4"]), ("Q:", " 4", ["▁4"]), ("Q: ", "4", ["▁4"]), ("Q:", "", []), ("", "4", ["▁4"])],
)
def test_prompt_and_completion_are_tokenized_as_one_text(prompt, completion, answer):
    tokenizer = spaced_tokenizer()
    encoded = tokenize_answer(tokenizer, prompt, completion, 64)
    assert encoded[0] == tokenizer(f"{prompt}{completion}<|eos|>")["input_ids"]
    assert learnt(tokenizer, encoded) == [*answer, "<|eos|>"]


def test_the_answers_of_a_pair_begin_at_the_same_token():
    tokenizer = spaced_tokenizer()
    chosen, rejected = tokenize_answers(tokenizer, "Q: ", ["4", "\n"], 64)
    assert learnt(tokenizer, chosen) == ["▁4", "<|eos|>"]
    assert learnt(tokenizer, rejected) == ["▁", "\n", "<|eos|>"]


def test_a_slow_tokenizer_has_the_targets_of_a_fast_one(monkeypatch):
    tokenizer = byte_tokenizer()
    fast = tokenize_chat(tokenizer, TURNS)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert tokenize_chat(tokenizer, TURNS) == fast
    assert learnt(tokenizer, fast)[-3:] == ["x", "<|im_end|>", "Ċ"]


def test_a_marked_answer_at_the_very_start_is_a_target():
    tokenizer = byte_tokenizer(MARKED.replace("{{ m['role'] }}:", ""))
    answers = [{"role": "assistant", "content": text} for text in ("ja", "x")]
    assert learnt(tokenizer, tokenize_chat(tokenizer, answers)) == [*"ja;", *"x;"]


MARKS = ("user", "assistant", "tool", "end", "return", "thought")
# GLM's habit: a turn ends where the next one begins.
UNENDED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<call>"
    "{% for key, value in call['function']['arguments'].items() %}{{ key }}={{ value }}{% endfor %}"
    "</call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Without any mark.
UNMARKED = UNENDED.replace("<|", "[").replace("|>", "]")
# Phi 3's habit: the end of all stands behind the last turn.
CLOSED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
# gpt-oss's habits: the last turn has another end, and thoughts of earlier ones are dropped.
RETURNS = (
    "{% set last = messages | length - 1 %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.index0 == last and m['thinking'] %}<|thought|>{{ m['thinking'] }}{% endif %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}({{ call['function']['arguments'] | tojson }}){% endfor %}"
    "{{ '<|return|>' if loop.index0 == last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Gemma 4's habit: answers of tools stand within the turn that called, and what was thought before is dropped.
WITHIN = (
    "{% set last = messages | length - 1 %}{% for m in messages %}"
    "{% if m['role'] != 'tool' %}<|{{ m['role'] }}|>{% endif %}"
    "{% if m['tool_calls'] %}{% if loop.index0 == last %}{{ m['thinking'] }}{{ m['content'] }}{% endif %}(f)<|tool|>"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# DeepSeek V3's habit: arguments are added to other text.
ADDS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '(' + call['function']['arguments'] + ')' }}{% endfor %}",
)

# A habit of templates that are written by hand: arguments are printed.
PRINTS = ADDS.replace(
    "'(' + call['function']['arguments'] + ')'", "'(' ~ call['function']['arguments'] ~ ')'"
)


def marked_tokenizer(template):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([f"<|{name}|>" for name in MARKS], special_tokens=True)
    return tokenizer


def words(tokenizer, encoded):
    tokens, targets = encoded
    pieces, before = [], False
    for token, is_one in zip(tokens, targets, strict=True):
        if is_one and not before:
            pieces.append([])
        if is_one:
            pieces[-1].append(token)
        before = is_one
    return [tokenizer.decode(piece) for piece in pieces]


def call(arguments, **others):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **others}


USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "content": "4"}
CALLS = [USER, call({"x": "1"}, content=""), RESULT, {"role": "assistant", "content": "ja"}]


def test_an_answer_without_an_end_ends_with_what_begins_the_next_turn():
    tokenizer = marked_tokenizer(UNENDED)
    encoded = tokenize_chat(tokenizer, [*CALLS, USER, {"role": "assistant", "content": "x"}])
    assert words(tokenizer, encoded) == ["<call>x=1</call><|tool|>", "ja<|user|>", "x<|user|>"]
    assert tokenizer.decode(encoded[0]).count("<|user|>") == 3
    assert words(tokenizer, tokenize_chat(tokenizer, CALLS[:2])) == ["<call>x=1</call><|tool|>"]
    assert words(tokenizer, tokenize_chat(tokenizer, CALLS[:3])) == ["<call>x=1</call><|tool|>"]
    tokenizer = byte_tokenizer(UNMARKED)
    assert words(tokenizer, tokenize_chat(tokenizer, TURNS)) == ["ja nein", "x<|eos|>"]


def test_scores_are_of_the_text_that_the_template_makes():
    tokenizer = marked_tokenizer(UNENDED)
    row = {"chosen": [USER, TURNS[1]], "rejected": [USER, TURNS[3]]}
    encode = scored_pair_encoder(tuple(row), tokenizer, RewardArguments(model_name_or_path="m"), "train_file")
    rendered = [tokenizer.apply_chat_template(row[side], tokenize=False) for side in row]
    assert [tokenizer.decode(tokens) for tokens, _ in encode(row)] == rendered
    encode = text_encoder(("messages",), tokenizer, ClassifyArguments(model_name_or_path="m"), "train_file")
    assert tokenizer.decode(encode({"messages": row["chosen"]})[0][0]) == rendered[0]


def test_earlier_turns_that_end_otherwise_than_the_last():
    turns = [USER, {"role": "assistant", "content": "a", "thinking": "t"}] * 2
    tokenizer = marked_tokenizer(CLOSED)
    assert words(tokenizer, tokenize_chat(tokenizer, turns)) == ["a<|end|>\n", "a<|end|>\n<|eos|>"]
    tokenizer = marked_tokenizer(RETURNS)
    assert words(tokenizer, tokenize_chat(tokenizer, turns)) == ["a<|end|>", "<|thought|>ta<|return|>"]
    calls = [*CALLS[:1], call({"x": 1}, content="", thinking="t"), *CALLS[2:]]
    assert words(tokenizer, tokenize_chat(tokenizer, calls)) == ['({"x": 1})<|end|>', "ja<|return|>"]


@pytest.mark.parametrize("content", ["", "a thought too"])
def test_calls_whose_thoughts_the_template_drops(content):
    tokenizer = marked_tokenizer(WITHIN)
    turns = [USER, call({}, content=content, thinking="t"), RESULT, {"role": "assistant", "content": "ja"}]
    assert words(tokenizer, tokenize_chat(tokenizer, turns)) == ["(f)<|tool|>", "ja<|end|>"]


@pytest.mark.parametrize("given", [{"x": 1, "y": "ä"}, '{"x":1, "y":"ä"}'])
@pytest.mark.parametrize("template", [RETURNS, ADDS, PRINTS])
def test_arguments_of_calls_may_be_text_whatever_the_template_takes(given, template):
    tokenizer = marked_tokenizer(template)
    quoted = {"role": "user", "content": "{'x': 1, 'y': 'ä'}"}
    messages = check_messages([quoted, call(given, content=None)])
    (answer,) = words(tokenizer, tokenize_chat(tokenizer, messages))
    assert answer.startswith('({"x": 1, "y": "ä"})')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "given", "learnt"),
    [
        (
            "a.jsonl",
            [{"x": None, "y": [{"z": None}]}, {"w": 1}],
            ['{"x": null, "y": [{"z": null}]}', '{"w": 1}'],
        ),
        ("b.jsonl", [{"x": 1}, {"x": None}], ['{"x": 1}', '{"x": null}']),  # the same keys in all rows
        ("c.jsonl", ['{"x": null}', '{"y": 1}'], ['{"x": null}', '{"y": 1}']),
        ("d.parquet", [{"x": 1, "y": None}, {"x": None, "y": {"z": 2}}], ['{"x": 1}', '{"y": {"z": 2}}']),
    ],
)
def test_arguments_keep_the_nulls_that_are_a_rows_own(stream, name, given, learnt, tmp_path):
    """Remove only the nulls of Arrow's structs, which replace keys that only other rows have."""
    asked = {**USER, "tool_calls": None}  # the same keys in all turns: a struct, of JSON too
    rows = [{"messages": [asked, call(each, content="")]} for each in given]
    path = tmp_path / name
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, arguments = marked_tokenizer(RETURNS), DataArguments(model_name_or_path="m", seq_length=256)
    load = (lambda *some: load_stream(*some, seed=None)) if stream else load_tokenized
    for make in (load, load_first) if stream else (load,):
        samples = make(TASKS["sft"], [str(path)], tokenizer, arguments)
        texts = [tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) for sample in samples]
        assert [text.partition("(")[2].partition(")")[0] for text in texts] == learnt


def test_calls_of_nothing_are_none_and_arguments_of_nothing_are_empty():
    assert check_messages([{**turn, "tool_calls": []} for turn in TURNS]) == TURNS
    for given in ("", "null", " null "):
        assert check_messages([call(given)]) == [call({})]


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (call("x"), r"turn 0 \(assistant\): arguments of a call are 'x'; expected a mapping"),
        (call("[1]"), "expected a mapping, or that as JSON text"),
        ({**call("{}"), "tool_calls": ["f"]}, r"tool_calls is .*; expected a list of mappings"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, r"weight is 0\.5; expected 0 or 1"),
    ],
)
def test_calls_and_weights_that_mean_nothing_are_named(message, reported):
    with pytest.raises(McaError, match=reported):
        check_messages([message])


def test_calls_that_the_template_does_not_write_are_refused(caplog):
    with pytest.raises(McaError, match="the chat template does not write tool_calls"):
        tokenize_chat(byte_tokenizer(), CALLS)
    encode = row_encoder(("messages",), byte_tokenizer(), PairArguments(model_name_or_path="m"), "train_file")
    for _ in range(2):
        encode({"messages": TURNS, "tools": [{"name": "f"}]})
    assert caplog.text.count("the chat template does not write a row's tools") == 1


@pytest.mark.parametrize("ending", ["", "<|im_end|>"])
def test_a_template_that_writes_no_text_of_answers_is_refused(ending):
    template = "{% for message in messages %}<|im_start|>{{ message.role }}" + ending + "{% endfor %}"
    with pytest.raises(McaError, match="the chat template does not write the content of answers; correct"):
        tokenize_chat(byte_tokenizer(template), TURNS)


def test_a_template_that_changes_answers_is_accepted():
    template = CHATML.replace("m['content']", "m['content'] | upper")
    found = learnt(byte_tokenizer(template), tokenize_chat(byte_tokenizer(template), TURNS))
    assert found[:2] == ["J", "A"]


def test_calls_that_are_only_read_are_told_if_the_template_does_not_write_them(caplog):
    tokenizer = byte_tokenizer("{# read #}" + CHATML)
    encode = text_encoder(("messages",), tokenizer, ClassifyArguments(model_name_or_path="m"), "train_file")
    reported = "the chat template does not write a row's tool_calls"
    ((read, _),) = encode({"messages": CALLS})
    assert tokenizer.decode(read) == tokenizer.apply_chat_template(CALLS, tokenize=False)
    assert caplog.text.count(reported) == 1
    tokenizer = byte_tokenizer("{# asked #}" + CHATML)
    assert words(tokenizer, tokenize_answer(tokenizer, CALLS[:3], CALLS[3:], 64)) == ["ja<|im_end|>\n"]
    assert caplog.text.count(reported) == 2
    forgotten = [CALLS[0], {**CALLS[1], "weight": 0}, *CALLS[2:]]
    assert words(tokenizer, tokenize_chat(tokenizer, forgotten)) == ["ja<|im_end|>\n"]


def test_shared_calls_are_calls_and_shared_tools_are_functions():
    function = {"name": "f", "arguments": {"x": "1"}}
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps([function, function])},
            {"from": "observation", "value": "4"},
            {"from": "function_call", "value": function},
        ],
        "tools": json.dumps([{"name": "f", "parameters": {}}]),
    }
    shape = row_converter(tuple(row), PairArguments(model_name_or_path="m"), "train_file")
    found = shape.convert(row)
    calls = [{"type": "function", "function": function}]
    assert [turn.get("tool_calls") for turn in found["messages"]] == [None, calls * 2, None, calls]
    assert [turn["content"] for turn in found["messages"]] == ["hi", "", "4", ""]
    assert found["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(McaError, match="a call of a function is 'x'; expected a mapping with 'name'"):
        shape.convert({"conversations": [{"from": "function_call", "value": "x"}]})


@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_has_variables_for_its_template(as_text):
    given = {"enable_thinking": False}
    template = CHATML.replace(
        "assistant\n{% endif %}", "assistant\n{{ 'quick' if enable_thinking == false else '' }}{% endif %}"
    ).replace(
        "{{ m['content'] }}",
        "{{ 'quick' if enable_thinking == false and m['role'] == 'assistant' else '' }}{{ m['content'] }}",
    )
    tokenizer = byte_tokenizer(template)
    row = {"chat_template_kwargs": json.dumps(given) if as_text else {**given, "other": None}}
    for shape in (
        {"messages": TURNS[:2]},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
        {"instruction": "hi", "output": "ja nein"},
    ):
        names = (*shape, *row)
        encode = row_encoder(names, tokenizer, PairArguments(model_name_or_path="m"), "train_file")
        (found,) = encode({**shape, **row})
        assert tokenizer.decode(found[0]) == tokenizer.apply_chat_template(TURNS[:2], tokenize=False, **given)
        assert words(tokenizer, found) == ["ja nein<|im_end|>\n"]
        with pytest.raises(McaError, match=r"chat_template_kwargs is .*; expected a mapping"):
            encode({**shape, "chat_template_kwargs": "x"})
        with pytest.raises(McaError, match="chat_template_kwargs: 'tokenize' is no variable of a template"):
            encode({**shape, "chat_template_kwargs": {"tokenize": True}})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_of_weight_0_is_no_target(template):
    tokenizer = byte_tokenizer(template)
    turns = [{**turn, "weight": weight} for turn, weight in zip(TURNS, (1, 0, 1, 1), strict=True)]
    assert words(tokenizer, tokenize_chat(tokenizer, turns)) == [
        "x;" if template == MARKED else "x<|im_end|>\n"
    ]


def test_an_earlier_answer_that_is_written_otherwise_ends_with_the_text_that_ends_the_last():
    """A last answer opens with an empty thought (Qwen3's habit), and the end of a turn is no token."""
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if loop.last and m['role'] == 'assistant' %}(){% endif %}"
        "{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    assert "".join(learnt(tokenizer, tokenize_chat(tokenizer, TURNS))) == "jaĠnein;()x;"


def test_an_empty_answer_may_be_context():
    turns = [USER, {"role": "assistant", "content": "", "weight": 0}, *TURNS[:2]]
    encode = row_encoder(["messages"], byte_tokenizer(), DataArguments(model_name_or_path="m"), "k")
    assert encode({"messages": turns})
    with pytest.raises(McaError, match=r"turn 1 \(assistant\): no content or tool_calls"):
        encode({"messages": [*turns[:1], {**turns[1], "weight": 1}, *turns[2:]]})
    encode = row_encoder(["messages"], marked_tokenizer(UNENDED), DataArguments(model_name_or_path="m"), "k")
    assert encode({"messages": CALLS}), "a tool call has no content"
