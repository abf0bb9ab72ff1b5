"""Tokenized samples that are kept: found again for the same rows and settings, and for no others."""

import json
import logging
import multiprocessing
import time
from pathlib import Path

import datasets
import pytest
from tokenizers_for_tests import THINKING, byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.data.medium_tokens import Grid
from mca_train.data.token_cache import _VERSION, load_or_build
from mca_train.data.token_dataset import PairDataset, TokenDataset
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_mixture, load_tokenized


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [
    {"prompt": "a", "completion": "b", "chosen": "bb", "rejected": "c"},
    {"prompt": "x" * 99, "completion": "b", "chosen": "bb", "rejected": "c"},
]


def loaded(file, folder, *, kind="sft", tokenizer=None, evaluation=False, **changes):
    arguments = PairArguments(
        **{"model_name_or_path": "m", "seq_length": 64, "tokenized_cache": str(folder)} | changes
    )
    found = load_tokenized(
        TASKS[kind], [file], tokenizer or byte_tokenizer(), arguments, evaluation=evaluation
    )
    return [{name: values.tolist() for name, values in found[place].items()} for place in range(len(found))]


def entries(folder):
    return {path.name for path in Path(folder).iterdir() if path.is_dir()}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_same_rows_are_not_tokenized_again_and_what_was_said_is_said_again(
    kind, tmp_path, caplog, monkeypatch
):
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    first = loaded(file, tmp_path / "cache", kind=kind)
    assert first == loaded(file, tmp_path / "cache", kind=kind, tokenized_cache=None)
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    caplog.clear()
    monkeypatch.setattr(type(TASKS[kind]), "encoder", None)  # what would make them
    moved = tmp_path / "elsewhere.jsonl"
    Path(file).rename(moved)  # the content counts, not the name
    with caplog.at_level(logging.INFO):
        assert loaded(str(moved), tmp_path / "cache", kind=kind) == first
    reported = [record.getMessage() for record in caplog.records]
    assert said[:1] == [line for line in reported if "left out" in line]
    assert any(line.startswith("loaded tokenized samples from ") for line in reported)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("kind", TASKS)
def test_of_each_kind_the_next_rank_reads_what_one_made(kind, evaluation, tmp_path, monkeypatch):
    rows = [ROWS[0] | {"text": "abc" * number, "label": number % 2} for number in range(1, 5)]
    file = jsonl(tmp_path / "a.jsonl", rows)
    own = {"num_labels": 2} if kind == "classify" else {}
    given = TASKS[kind].data_arguments(
        model_name_or_path="m", seq_length=8, tokenized_cache=str(tmp_path / "cache"), **own
    )

    def load():
        found = load_tokenized(TASKS[kind], [file], byte_tokenizer(), given, evaluation=evaluation)
        return [{name: each.tolist() for name, each in found[place].items()} for place in range(len(found))]

    first = load()
    assert len(first) >= 2
    monkeypatch.setattr(type(TASKS[kind]), "samples", None)  # what would make them
    assert load() == first


def test_other_rows_settings_kinds_and_tokenizers_are_others(tmp_path):
    cache = tmp_path / "cache"
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    loaded(file, cache)
    others = [
        {"seq_length": 63},
        {"completion_column": "chosen"},
        {"completion_column": "completion"},  # named, it is read whatever other columns there are
        {"kind": "dpo"},
        {"tokenizer": byte_tokenizer(THINKING)},
        {"max_train_samples": 1},
        {"evaluation": True},
    ]
    for number, changes in enumerate(others, 2):
        loaded(file, cache, **changes)
        assert len(entries(cache)) == number, changes
    loaded(file, cache, preprocessing_num_workers=1, model_name_or_path="other")
    assert len(entries(cache)) == len(others) + 1
    loaded(jsonl(tmp_path / "a.jsonl", ROWS[:1]), cache)
    assert len(entries(cache)) == len(others) + 2


def test_an_entry_that_is_damaged_is_made_again(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    first = loaded(file, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    tokens = tmp_path / "cache" / entry / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    assert loaded(file, tmp_path / "cache") == first
    assert loaded(file, tmp_path / "cache") == first
    assert entries(tmp_path / "cache") == {entry}


def test_the_sources_of_a_mixture_are_kept_each(tmp_path):
    sources = [{"path": jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])} for name in "ab"]
    arguments = PairArguments(
        model_name_or_path="m", datasets=sources, tokenized_cache=str(tmp_path / "cache")
    )
    for _ in range(2):
        assert len(load_mixture(TASKS["sft"], byte_tokenizer(), arguments, seed=0)) == 2
        assert len(entries(tmp_path / "cache")) == 2


def _no_images():
    raise AssertionError("there are no images")


def _slowly(folder, made):
    def make():
        with Path(made).open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        return PairDataset(TokenDataset.from_samples([([1, 2], [True, True])] * 2))

    assert len(load_or_build(Path(folder), "key", make, _no_images)) == 1


def test_of_several_processes_one_makes_and_the_others_wait(tmp_path):
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=_slowly, args=(tmp_path / "cache", tmp_path / "made")) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(McaError, match="file/cache: cannot be written"):
        loaded(jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "file" / "cache")


def test_the_version_of_the_cache_changes_with_the_numbers_of_a_grid():
    assert (_VERSION, len(Grid(1, 1).numbers)) == (16, 7), "raise _VERSION with each new number"
