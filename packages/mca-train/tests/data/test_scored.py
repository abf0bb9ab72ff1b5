"""Rows that are scored: what is read of them, and their numbers, in memory and streamed alike."""

import json

import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import RewardArguments
from mca_train.data import scoring
from mca_train.tasks import TASKS
from mca_train.tasks.classify import Labels
from mca_train.tasks.load import load_stream, load_tokenized


def rows_of(kind, tmp_path, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cls = RewardArguments if kind == "reward" else Labels
    data = cls(model_name_or_path="m", seq_length=16, tokenized_cache=str(tmp_path / "cache"), **settings)
    made = load_tokenized(TASKS[kind], [str(path)], byte_tokenizer(), data)
    again = load_tokenized(TASKS[kind], [str(path)], byte_tokenizer(), data)  # from the cache
    streamed = list(load_stream(TASKS[kind], [str(path)], byte_tokenizer(), data, seed=None))
    found = [plain(made[index]) for index in range(len(made))]
    assert found == [plain(again[index]) for index in range(len(again))] == [plain(row) for row in streamed]
    return found


def plain(sample):
    return {name: values.tolist() for name, values in sample.items()}


def test_pairs_carry_their_margin_on_both_sides(tmp_path):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "de", "margin": 0.5}]
    (found,) = rows_of("reward", tmp_path, rows)
    assert found["chosen_values"] == found["rejected_values"] == [0.5]
    assert found["chosen_input_ids"] == found["chosen_labels"]  # nothing is masked
    assert len(found["rejected_input_ids"]) == len(found["chosen_input_ids"]) + 1


def test_pairs_without_prompt_or_margin(tmp_path):
    (found,) = rows_of("reward", tmp_path, [{"chosen": "abc", "rejected": "de"}])
    assert "chosen_values" not in found


def test_a_margin_and_a_text_that_are_named_are_read(tmp_path):
    row = {"chosen": "abc", "rejected": "de", "margin": 0.5, "better": 2.0}
    (found,) = rows_of("reward", tmp_path, [row], margin_column="better")
    assert found["chosen_values"] == [2.0]
    with pytest.raises(McaError, match=r"no column 'bettr', which margin_column names .* or remove it"):
        rows_of("reward", tmp_path, [row], margin_column="bettr")
    row = {"messages": [{"role": "user", "content": "old"}], "review": "abc", "label": 1}
    (found,) = rows_of("classify", tmp_path, [row], num_labels=2, text_column="review")
    assert found["input_ids"] == byte_tokenizer()("abc")["input_ids"]
    with pytest.raises(
        McaError, match=r"no column 'revue', which text_column names .* format found: messages"
    ):
        rows_of("classify", tmp_path, [row], num_labels=2, text_column="revue")


def test_pairs_that_do_not_fit_whole_are_left_out(tmp_path, caplog):
    rows = [
        {"prompt": "x" * 20, "chosen": "a", "rejected": "b"},
        {"prompt": "x", "chosen": "a", "rejected": "bc"},
    ]
    (found,) = rows_of("reward", tmp_path, rows)
    assert len(found["rejected_input_ids"]) == 4
    assert (
        "1 of 2 rows do not have both answers whole, of two tokens or more, within seq_length 16"
        in caplog.text
    )
    assert "cut at the end" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "label", "values"),
    [
        ({"labels": ["no", "yes"]}, "yes", [1.0]),
        ({"num_labels": 3}, 2, [2.0]),
        ({"labels": list("abc"), "problem_type": "multi_label_classification"}, ["c", "a"], [1.0, 0.0, 1.0]),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, [0, 1, 1], [0.0, 1.0, 1.0]),
        ({"problem_type": "regression"}, 0.25, [0.25]),
        ({"problem_type": "regression", "num_labels": 2}, [1.0, -2.0], [1.0, -2.0]),
    ],
)
def test_texts_carry_what_is_right(tmp_path, settings, label, values):
    (found,) = rows_of("classify", tmp_path, [{"text": "abc", "label": label}], **settings)
    assert found["values"] == values


@pytest.mark.parametrize(
    ("settings", "label", "message"),
    [
        ({"labels": ["no", "yes"]}, "maybe", "row 0: label is 'maybe'; expected one of no, yes"),
        ({"num_labels": 2}, 2, "row 0: label is 2; expected one of LABEL_0, LABEL_1"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, [1], "0 or 1 for each of them"),
        ({"problem_type": "regression"}, "x", "label is 'x'; expected a number"),
        ({"problem_type": "regression", "num_labels": 2}, [1.0], "label has 1 numbers, expected 2"),
    ],
)
def test_labels_that_mean_nothing_are_named(tmp_path, settings, label, message):
    with pytest.raises(McaError) as error:
        rows_of("classify", tmp_path, [{"text": "abc", "label": label}], **settings)
    assert message in str(error.value)


def test_padding_at_the_end_is_not_read(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "cd"}) + "\n")
    data = RewardArguments(model_name_or_path="m", seq_length=16)
    pair = load_tokenized(TASKS["reward"], [str(path)], tokenizer, data)[0]
    assert tokenizer.eos_token_id not in pair["chosen_input_ids"].tolist()


def test_labels_are_numbered_from_0():
    names = ("good", "bad", "ugly")
    assert [scoring._class(label, names, "label") for label in (0, 2, "good", "ugly")] == [0, 2, 0, 2]
    for label in (-1, 3):
        with pytest.raises(McaError, match="expected one of good, bad, ugly, or its number from 0"):
            scoring._class(label, names, "label")


@pytest.mark.parametrize(
    ("tokens", "padding", "kept"),
    [
        ([5, 7, 7], 7, [5]),
        ([7, 7, 7], 7, [7]),
        ([7], 7, [7]),
        ([], 7, []),
        ([7, 5], 7, [7, 5]),
        ([5, 7], None, [5, 7]),
    ],
)
def test_padding_at_the_end_is_cut_off_but_for_a_first_token(tokens, padding, kept):
    assert scoring._strip_padding(tokens, padding) == (kept, [True] * len(kept))
