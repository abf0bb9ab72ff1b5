import json

import datasets
import pytest
import torch
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.data import encoding
from mca_train.losses.preference import PairLogps, PreferenceLoss
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(tmp_path, *rows, **changes):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tokenized(
        TASKS["dpo"], [str(file)], byte_tokenizer(), PairArguments(model_name_or_path="m", **changes)
    )


def sides(item):
    tokenizer = byte_tokenizer()
    found = []
    for side in ("chosen", "rejected"):
        ids, labels = item[f"{side}_input_ids"], item[f"{side}_labels"]
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[labels != -100])))
    return found


USER, GOOD, BAD = (
    {"role": r, "content": c} for r, c in [("user", "hi"), ("assistant", "yes"), ("assistant", "no")]
)
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_texts(tmp_path):
    (item,) = load(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "five"})
    assert sides(item) == [("2+2=4<|eos|>", "4<|eos|>"), ("2+2=five<|eos|>", "five<|eos|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # as UltraFeedback has it
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_messages_with_and_without_a_prompt(tmp_path, row):
    (item,) = load(tmp_path, row)
    assert sides(item) == [
        (f"{CHAT}yes<|im_end|>\n", "yes<|im_end|>\n"),
        (f"{CHAT}no<|im_end|>\n", "no<|im_end|>\n"),
    ]


def test_pairs_whose_answer_is_cut_off_are_left_out(tmp_path, caplog):
    rows = [
        {"prompt": "x" * 9, "chosen": "y", "rejected": "z"},
        {"prompt": "x", "chosen": "y", "rejected": "z"},
    ]
    assert len(load(tmp_path, *rows, seq_length=8)) == 1
    assert "1 of 2 rows do not have both answers within seq_length 8" in caplog.text
    assert "1 of 2 rows are longer than seq_length 8" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "no column 'rejected' (columns: prompt, chosen); preference pairs have chosen and rejected, ",
        ),
        (
            {"prompt": None, "chosen": "b", "rejected": "c"},
            "row 0: chosen and rejected are text, so the prompt",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "row 0: there is no prompt"),
        (
            {"prompt": "hello", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "row 0: chosen begins with a turn of the user, but does not repeat the prompt",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            "row 0: rejected is None; expected text or a list",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": [BAD]},
            "chosen is text and rejected is a list; expected",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(McaError) as error:
        load(tmp_path, row)
    assert message in str(error.value)


def test_label_smoothing_is_the_mean_over_both_ways_round():
    policy, reference = (PairLogps(*torch.randn(2, 3).mul(3)) for _ in range(2))
    turned = [PairLogps(a.rejected, a.chosen) for a in (policy, reference)]
    tokens = PairLogps(torch.ones(3), torch.ones(3))
    plain, smooth = PreferenceLoss(beta=0.3), PreferenceLoss(beta=0.3, label_smoothing=0.2)
    mean = 0.8 * plain(policy, tokens, reference) + 0.2 * plain(turned[0], tokens, turned[1])
    assert torch.allclose(smooth(policy, tokens, reference), mean)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"label_smoothing": 0.6},
        {"kind": "ipo", "label_smoothing": 0.1},
        {"kind": "exo_pair"},
        {"kind": "aot"},
        {"kind": "sigmod"},
        {"simpo_gamma": 0.5},
        {"kind": "orpo", "rpo_alpha": 1.0},
        {"rpo_alpha": -1.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(options):
    with pytest.raises(McaError, match=r"dpo_|rpo_alpha"):
        PreferenceLoss(**options)


def test_conversations_without_a_prompt_begin_with_the_same_message():
    chosen, rejected = (
        [{"role": "user", "content": question}, {"role": "user", "content": "more"}, *answer]
        for question, answer in (
            ("one", [{"role": "assistant", "content": "good"}]),
            ("two", [{"role": "assistant", "content": "bad"}]),
        )
    )
    with pytest.raises(McaError, match="no common beginning"):
        encoding._split_messages(None, chosen, rejected)
