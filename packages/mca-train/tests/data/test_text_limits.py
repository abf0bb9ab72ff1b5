"""Texts that are cut, or known to be short, without tokenizing all of them; with tokenizers made by hand."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data import streams
from mca_train.data.chat import has_generation_marks
from mca_train.data.long_texts import TokenPrefix, encode_prefix, split_text
from mca_train.data.streams import (
    RowsWithTargets,
    SampleBuilder,
    has_target,
    pair_target_check,
    sft_target_check,
)


@pytest.mark.parametrize(
    ("letters", "tokens_of_128", "read", "is_prefix"),
    [
        (128, 128, [128], False),
        (129, 67, [128], True),
        (129, 66, [128, 129], False),
        (1024, 66, [128, 1024], False),
        (1025, 66, [128, 1024], True),
        (1025, 8, [128, 1024, 1025], False),
    ],
)
def test_only_the_beginning_of_a_long_text_is_tokenized(
    letters: int, tokens_of_128: int, read: list[int], is_prefix: bool
) -> None:
    """Two tokens are needed: 128 letters are tokenized first, and eight times as many if that is not sure to do."""
    asked: list[int] = []

    def tokenizer(text: str, *, verbose: bool, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not verbose and not add_special_tokens
        asked.append(len(text))
        return {"input_ids": [1] * (len(text) * tokens_of_128 // 128)}

    found = encode_prefix(tokenizer, "x" * letters, 2, add_special_tokens=False)["input_ids"]  # type: ignore[arg-type]
    assert asked == read and isinstance(found, TokenPrefix) == is_prefix
    asked.clear()
    encode_prefix(tokenizer, "x" * letters, None, add_special_tokens=False)  # type: ignore[arg-type]
    assert asked == [letters]


def doubled(text: str, **_: Any) -> dict[str, list[str]]:
    """Tokenize letters, but for two spaces, which are one token."""
    return {"input_ids": re.findall("  |.|\n", text)}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("aaaaa bbbbb", ["aaaaa bbbbb"]),
        ("aaaaaa bbbbbb", ["aaaaaa", " bbbbbb"]),
        ("aaaaaa\nbbbbbb", ["aaaaaa", "\nbbbbbb"]),
        ("aaaaa bbbbbbb", ["aaaaa bbbbbbb"]),
        ("aaaaa  bb ccccc", ["aaaaa  bb", " ccccc"]),
        ("aaaaaaaaa bbbbb", ["aaaaaaaaa", " bbbbb"]),
        ("aaaaaaaaaa bbbb", ["aaaaaaaaaa bbbb"]),
        ("aaaaaaa bbbbbbb ccccccc", ["aaaaaaa", " bbbbbbb", " ccccccc"]),
    ],
)
def test_a_text_is_cut_after_a_piece_where_its_tokens_stay_the_same(text: str, pieces: list[str]) -> None:
    """A piece has more than five letters and at most ten, and a text of at most ten is one piece."""
    found = list(split_text(doubled, text, 5))  # type: ignore[arg-type]
    assert found == pieces and "".join(found) == text
    tokens = [token for piece in found for token in doubled(piece)["input_ids"]]
    assert tokens == doubled(text)["input_ids"]


@pytest.mark.parametrize("others", [0, 10])
@pytest.mark.parametrize(("letter", "fitting"), [("a", 49), ("\u00e9", 24), ("\ufdfa", 1)])
def test_a_text_is_short_with_two_tokens_for_each_byte(others: int, letter: str, fitting: int) -> None:
    """64 tokens are those of the tokenizer itself; letters count with what normalization makes of them."""
    length = 64 + 2 * (50 + others)
    for count, is_short in ((fitting, True), (fitting + 1, False)):
        assert streams._is_shorter_than(letter * count, length, others) is is_short
        assert streams._is_shorter_than(letter * count, length + 1, others) is is_short
    is_short = streams._is_shorter_than(letter * fitting, length - 1, others)
    assert is_short is (letter != "a"), "a room of an odd length is rounded down"


def turn(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize("before", [[], ["abc"], ["ab", "c"], ["a", "b", "c"]])
def test_a_template_may_add_letters_to_a_conversation_and_to_each_turn(before: list[str]) -> None:
    letters = 1024 + 128 * (len(before) + 1) + len("".join(before)) + 1
    messages: list[Any] = [*(turn("user", text) for text in before), turn("assistant", "d")]
    for length, is_early in ((64 + 2 * letters, True), (63 + 2 * letters, False)):
        assert streams._has_early_answer(messages, length) is is_early


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        [],
        [turn("user", "a")],
        [turn("user", " "), turn("assistant", "b")],
        [turn("user", [{"text": "a"}]), turn("assistant", "b")],
        [turn("user", "a"), turn("assistant", "")],
        [turn("user", "a"), turn("assistant", "b", weight=0), turn("assistant", "c")],
        ["a", turn("assistant", "b")],
    ],
)
def test_a_conversation_of_another_kind_is_not_sure_to_have_an_answer(messages: Any) -> None:
    assert not streams._has_early_answer(messages, 1 << 20)


def test_one_of_several_templates_may_mark_answers() -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    several = {"plain": "{{ m.content }}", "marked": marked}
    for template, found in ((several, True), (marked, True), ({"plain": ""}, False), (None, False)):
        assert has_generation_marks(SimpleNamespace(chat_template=template)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "arguments", "sure"),
    [
        ({"messages": [turn("user", "a"), turn("assistant", "b")]}, {}, True),
        ({"messages": [turn("user", "a"), turn("assistant", "b")], "tools": ["t"]}, {}, False),
        (
            {"messages": [turn("user", "a"), turn("assistant", "b")], "chat_template_kwargs": {"a": 1}},
            {},
            False,
        ),
        ({"messages": [turn("user", "a"), turn("assistant", "b")]}, {"data_format": "messages"}, False),
        ({"prompt": "a", "completion": "b"}, {}, True),
        ({"prompt": None, "completion": "b"}, {}, False),
        ({"prompt": "a", "completion": ["b"]}, {}, False),
        ({"prompt": "a" * 4000, "completion": "b"}, {}, False),
        ({"text": "a"}, {}, True),
        ({"text": "-" * 63 + "a"}, {}, True),
        ({"text": "-" * 64 + "a"}, {}, False),
        ({"text": "\u00e9"}, {}, False),
        ({"text": None}, {}, False),
        ({"text": "a", "completion": "b", "prompt": "c"}, {}, False),
        ({"text": "a", "conversations": []}, {}, False),
        ({"text": "a", "other": "b"}, {}, True),
    ],
)
def test_rows_are_sure_to_have_an_answer_by_their_columns(
    row: Any, arguments: dict[str, Any], sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DataArguments(model_name_or_path="m", seq_length=4096, **arguments)
    monkeypatch.setattr(streams, "has_generation_marks", lambda tokenizer: tokenizer == "marked")
    assert sft_target_check("plain", options)(row) is sure  # type: ignore[arg-type]
    marked = sft_target_check("marked", options)(row)  # type: ignore[arg-type]
    assert marked is (sure and "messages" not in row), "its template may leave answers out"


@pytest.mark.parametrize(
    ("row", "arguments", "sure"),
    [
        ({}, {}, True),
        ({"other": 1}, {}, True),
        ({"prompt": "a" * 2015}, {}, True),
        ({"prompt": "a" * 2016}, {}, False),
        ({"chosen": ["b"]}, {}, False),
        ({"rejected": None}, {}, False),
        ({"conversations": []}, {}, False),
        ({}, {"data_format": "messages"}, False),
    ],
)
def test_pairs_are_sure_to_have_answers_after_a_short_prompt(
    row: Any, arguments: dict[str, Any], sure: bool
) -> None:
    options = PairArguments(model_name_or_path="m", seq_length=4096, **arguments)
    assert pair_target_check(options)({"prompt": "a", "chosen": "b", "rejected": "c", **row}) is sure


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ({"labels": [-100, 3]}, True),
        ({"labels": [3, -100]}, False),
        ({"labels": [3]}, False),
        ({"chosen_labels": [-100, 3], "rejected_labels": [-100, -100, 5]}, True),
        ({"chosen_labels": [-100, 3], "rejected_labels": [5, -100]}, False),
        ({"input_ids": [1, 2]}, True),
    ],
)
def test_a_sample_has_a_target_after_the_first_token_of_each_sequence(labels: Any, found: bool) -> None:
    assert has_target({name: torch.tensor(values) for name, values in labels.items()}) is found


class Row(dict[str, Any]):
    place = "row 3 of a"


def test_a_sample_is_built_once_for_one_row_and_names_it_in_errors() -> None:
    built: list[Any] = []

    def encode(row: Any) -> Any:
        if "bad" in row:
            raise McaError("is bad")
        built.append(row)
        return {"number": len(built)}

    make = SampleBuilder(encode, "train_file")
    first, second = Row(a=1), Row(a=1)
    assert [make(row)["number"] for row in (first, first, second, first)] == [1, 1, 2, 3]
    for row, place in ((Row(bad=1), ", row 3 of a"), ({"bad": 1}, "")):
        with pytest.raises(McaError, match=f"^train_file{place}: is bad$"):
            make(row)


def test_rows_without_a_target_are_counted_in_each_pass_and_reported_once(caplog: Any) -> None:
    epochs: list[int] = []
    numbers = [0, 1, 2, 3]

    class Rows:
        set_epoch = epochs.append

        def __iter__(self) -> Any:
            return iter([SimpleNamespace(number=number) for number in numbers])

    def make(row: Any) -> Any:
        assert row.number != 1, "sure to have one"
        return {"labels": torch.tensor([-100, 5 if row.number == 2 else -100])}

    made: Any = RowsWithTargets(Rows(), make, lambda row: row.number == 1, "rows do not fit")  # type: ignore[arg-type]
    made.set_epoch(4)
    for _ in range(2):
        assert [row.number for row in made] == [1, 2]
    assert epochs == [4] and caplog.messages == ["rows do not fit and are left out: 2 of 4 rows"]
    numbers[:] = [1, 2]
    other: Any = RowsWithTargets(Rows(), make, lambda row: row.number == 1, "others do not fit")  # type: ignore[arg-type]
    assert len(list(made)) == len(list(other)) == 2
    assert len(caplog.messages) == 1
    numbers[:] = [0]
    with pytest.raises(McaError, match=r"^rows do not fit: all 1 row; raise seq_length"):
        list(made)
    numbers[:] = []
    assert list(made) == []
