"""``mca-train data``: what a model would see, and what is left out."""

import json
from unittest.mock import patch

import pytest

from mca_train.cli import main


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"prompt": "2+2=", "completion": "4"}] * 3 + [{"prompt": "x" * 99, "completion": "y"}]


def test_counts_lengths_samples_and_what_is_left_out(run, tmp_path, capsys):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    held_out = jsonl(tmp_path / "held_out.jsonl", ROWS[:1])
    assert main(["data", "sft", run(train_file=file, eval_file=held_out, sequence_packing=True)]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "eval_file, mca-train sft\n1 sample, 6 tokens, of which 2 are targets" in out
    assert "3 samples, 18 tokens, of which 6 are targets" in out
    assert "tokens of a sample: 6 to 6, median 6, mean 6" in out
    assert "  6 - 6  ########################################  3\n" in out
    assert out.count("  | 2+2=⟦4<|eos|>⟧\n") == 4
    assert "train_file: 1 of 4 rows are longer than seq_length 64 and are truncated at the end" in out
    assert "train_file: 1 of 4 rows do not have an answer within seq_length 64 and are left out" in out
    assert "packing: 3 samples of 18 tokens in 1 pack of 64: 28.1% full" in out


def test_a_mixture_pairs_and_a_stream(run, tmp_path, capsys):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "bb", "rejected": "c"}] * 2)
    assert main(["data", run(train_file=..., datasets=[{"path": pairs}], dpo_beta=0.1)]) == 0
    out = capsys.readouterr().out
    assert "datasets, mca-train dpo\n2 pairs, 14 tokens, of which 10 are targets" in out
    assert "  | a⟦bb<|eos|>⟧\n  | a⟦c<|eos|>⟧\n" in out
    assert "pairs 2 of 2 samples (1.00 epochs)" in out
    texts = jsonl(tmp_path / "texts.jsonl", [{"text": "abc"}] * 40)
    stream = {"train_file": texts, "streaming": True, "max_steps": 1, "max_train_samples": 5}
    with patch("mca_train.tasks.load.load_rows", side_effect=AssertionError("reads all rows")):
        assert main(["data", "pretrain", run(**stream, output_dir=...)]) == 0
    out = capsys.readouterr().out
    assert "streaming: the first 5 rows\n" in out
    assert "1 sample, 20 tokens" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": "/none.jsonl"}, "train_file: file /none.jsonl does not exist"),
        (
            {"train_file": ..., "datasets": [{"path": "x", "wieght": 1}, {"path": "y", "weight": -1}]},
            "2 problems\n  datasets, entry 0: unknown key 'wieght'; did you mean 'weight'?\n"
            "  datasets, entry 1: weight is -1.0; expected",
        ),
        (
            {"train_file": ..., "datasets": [{"path": "/none.jsonl"}, {"path": "org/other"}]},
            "datasets, none: file /none.jsonl does not exist\n",
        ),
        (
            {"train_file": ..., "datasets": [{"path": __file__}]},
            "test_data_command.py ends in '.py'; expected",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_read(changes, message, run, capsys):
    assert main(["data", "sft", run(**changes)]) == 2
    assert message in capsys.readouterr().err
