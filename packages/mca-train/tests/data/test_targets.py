"""Which tokens are targets, with the tokenizers and templates of common models' kinds."""

import pytest
from tokenizers_for_tests import SPACED, SPACED_MARKED, spaced_tokenizer

from mca_train.data.chat import tokenize_chat
from mca_train.data.encoding import tokenize_answer, tokenize_answers

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
