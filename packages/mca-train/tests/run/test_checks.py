"""A run is checked once, and what it is made of is read once."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from mca_train.cli import main
from mca_train.config import model
from mca_train.run import plan_command, rules, train
from mca_train.run.early_rules import weights_problems
from mca_train.run.settings import load_values, make_settings
from mca_train.tasks import TASKS


class Counted:
    """A function, and the first arguments of its calls."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *arguments, **others):
        self.calls.append(arguments[0])
        return self.function(*arguments, **others)


@pytest.fixture
def counted(monkeypatch):
    check, parse = Counted(plan_command.check), Counted(model.model_config)
    monkeypatch.setattr(plan_command, "check", check)
    monkeypatch.setattr(train, "check", check)
    monkeypatch.setattr(model, "model_config", parse)
    monkeypatch.setattr(rules, "model_config", parse)
    return check, parse


@pytest.mark.usefixtures("own_threads")
def test_a_run_and_its_plan_are_checked_once_and_parse_each_model_once(counted, run, tmp_path, monkeypatch):
    check, parse = counted
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    path = run(reference_model_name_or_path=str(other), lora_rank=2)
    assert main(["plan", "dpo", path]) == 0
    assert [task.name for task in check.calls] == ["dpo"]
    assert parse.calls == [str(tmp_path / "model"), str(other)]
    check.calls.clear(), parse.calls.clear()
    prepared = []
    monkeypatch.setattr(train, "prepare_inputs", lambda run, lock: prepared.append(run))
    monkeypatch.setattr(train.launcher, "fork_ranks", lambda rank, ranks, folder: 0)
    assert main(["dpo", path]) == 0
    assert [task.name for task in check.calls] == ["dpo"]
    assert parse.calls == [str(tmp_path / "model"), str(other)]
    assert prepared[0].reference == prepared[0].model == prepared[0].stored


def refusals(path, capsys):
    """Return the errors of the run, and of the plan with missing files."""
    assert main(["sft", path]) == 2
    reported = capsys.readouterr().err
    main(["plan", "sft", path])
    return reported, capsys.readouterr().out


def test_a_tokenizer_that_is_not_there_or_damaged_is_told_of_by_the_run_and_the_plan(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for wrong, expected in (
        (tmp_path / "gone", f"tokenizer_name_or_path: directory {tmp_path / 'gone'} does not exist"),
        (tmp_path / "empty", f"no tokenizer in {tmp_path / 'empty'} (set tokenizer_name_or_path)"),
    ):
        path = run(tokenizer_name_or_path=str(wrong), train_file="/none.jsonl")
        for reported in refusals(path, capsys):
            assert expected in reported
            assert "file /none.jsonl does not exist" in reported
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text()[:100])
    for reported in refusals(run(), capsys):
        assert str(file) in reported


def test_a_tokenizer_with_more_tokens_than_an_adapter_has_rows_is_told_of_by_the_run_and_the_plan(
    run, tmp_path, capsys
):
    file: Path = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"vocab_size": 100}))
    for reported in refusals(run(lora_rank=2), capsys):
        assert "the model's vocabulary 100, and an adapter does not contain the new rows" in reported
    assert main(["plan", "sft", run()]) == 0


WHOLE = save({"x": np.zeros(4)})
FILES = {
    "missing": ({"a": WHOLE}, ["model: 1 of 2 files named in model.safetensors.index.json are missing (b"]),
    "truncated": ({"a": WHOLE, "b": WHOLE[:-1]}, ["b.safetensors: the tensors end at byte"]),
    "in the header": (
        {"a": WHOLE[:20], "b": b""},
        ["a.safetensors: its header", "b.safetensors: 0 bytes are"],
    ),
    "complete": ({"a": WHOLE, "b": WHOLE}, []),
    "one file": ({"a": b"", "model": WHOLE}, []),
    "one truncated file": ({"a": b"", "model": WHOLE[:-1]}, ["model.safetensors: the tensors end at"]),
    "MCA": ({"a": b"", "mca_config.json": b"{}"}, []),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["model", "reference"])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_weights_are_complete_before_the_ranks_start(kind, where, name, run, tmp_path):
    files, reported = FILES[name]
    folder = tmp_path / "model"
    if where == "reference":
        folder = tmp_path / "reference_model"
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    for file, content in files.items():
        (folder / (file if "." in file else f"{file}.safetensors")).write_bytes(content)
    names = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    key = {} if where == "model" else {"reference_model_name_or_path": str(folder)}
    settings = make_settings(TASKS[kind], *load_values(Path(run(**key)), []))
    found = list(weights_problems(TASKS[kind], settings))
    assert len(found) == len(reported) and all(map(str.__contains__, found, reported))
    beginning = str(folder) if where == "model" else f"reference_model_name_or_path: {folder}"
    assert all(problem.startswith(beginning) for problem in found)
    # a model of the Hub is checked before its download, which completes an interrupted one
    if name != "MCA":
        assert rules.check(TASKS[kind], settings).missing == ()


LABELED = [{"prompt": "a", "completion": "b", "label": True}] * 3
LATE = [{"prompt": "x" * 99, "completion": "y"}] * 3


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    ("kind", "rows", "changes", "reported"),
    [
        (
            "kto",
            LABELED[:1],
            {},
            "train_file: kto needs the answers of other samples, but a dataset has only",
        ),
        ("kto", LABELED, {"max_eval_samples": 1}, "eval_file: kto needs the answers of other samples"),
        ("kto", LABELED, {"max_eval_samples": 2}, None),
        ("sft", LATE, {}, "train_file: no row has an answer within seq_length 64; raise seq_length, or look"),
        (
            "sft",
            LATE,
            {"streaming": True, "max_steps": 1},
            "train_file: rows do not have an answer within seq_length 64: all 3 rows; raise seq_length, or look",
        ),
    ],
)
def test_datasets_without_enough_samples_are_reported_before_the_ranks_start(
    kind, rows, changes, reported, run, tmp_path, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(train.launcher, "fork_ranks", lambda rank, ranks, folder: started.append(ranks) or 0)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "max_eval_samples" in changes:
        changes = changes | {"eval_file": str(file)}
    path = run(train_file=str(file), gradient_accumulation_steps=2, nproc_per_node=1, **changes)
    assert main([kind, path]) == (0 if reported is None else 1)
    assert (reported or "") in capsys.readouterr().err
    assert started == ([1] if reported is None else [])
