"""Several sources as one dataset: shares, names, columns, splits."""

import json

import datasets
import numpy as np
import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.mixture import Mixture, shares
from mca_train.data.sources import parse_sources
from mca_train.data.token_dataset import TokenDataset
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_mixture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def part(first, count):
    return TokenDataset.from_samples([([first + n] * 3, [True] * 3) for n in range(count)])


def counts(mixture):
    tokens = [int(mixture[place]["input_ids"][0]) for place in range(len(mixture))]
    return np.unique(tokens, return_counts=True)


def test_without_weights_every_sample_comes_once():
    mixture = Mixture([part(0, 3), part(10, 5)], ["a", "b"], None, 0)
    assert len(mixture) == 8
    values, times = counts(mixture)
    assert values.tolist() == [0, 1, 2, 10, 11, 12, 13, 14] and set(times) == {1}
    assert mixture.lengths.tolist() == [3] * 8
    assert [int(mixture[place]["source"]) for place in range(8)] == [0] * 3 + [1] * 5


def test_weights_are_shares_of_the_samples_and_small_sources_repeat():
    mixture = Mixture([part(0, 4), part(100, 36)], ["a", "b"], [3, 1], 7)
    assert np.bincount(mixture.sources).tolist() == [30, 10]
    values, times = counts(mixture)
    assert sorted(times[values < 100]) == [7, 7, 8, 8]  # 30 of 4: seven passes and two more
    assert set(times[values >= 100]) == {1}
    assert mixture.describe() == "a 30 of 4 samples (7.50 epochs), b 10 of 36 samples (0.28 epochs)"
    again = Mixture([part(0, 4), part(100, 36)], ["a", "b"], [3, 1], 7)
    assert (again.indices == mixture.indices).all()
    assert (Mixture([part(0, 4), part(100, 36)], ["a", "b"], [3, 1], 8).indices != mixture.indices).any()


def test_a_mixture_says_what_its_order_comes_from():
    def words(weights=None, seed=7, parts=((0, 4), (100, 36))):
        return Mixture([part(*each) for each in parts], ["a", "b"], weights, seed).order_description

    assert words() == words(seed=8) == "4 of 4 samples of a, 36 of 36 samples of b"
    assert (
        words([3, 1])
        == words([0.75, 0.25])
        == "30 of 4 samples of a, 10 of 36 samples of b, picked by seed 7"
    )
    assert len({words([3, 1]), words([1, 3]), words([3, 1], 8), words(parts=((0, 36), (100, 4)))}) == 4


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.7, 0.2, 0.1], [1000, 1, 1], [1e-9, 1, 1]])
def test_shares_add_up_and_leave_nobody_out(weights):
    found = shares(weights, 100)
    assert found.min() >= 1
    assert abs(int(found.sum()) - 100) <= 1
    assert np.abs(found - np.array(weights) / sum(weights) * 100).max() <= 1


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(entries, **named):
    arguments = DataArguments(model_name_or_path="m", seq_length=64, datasets=entries, **named)
    return load_mixture(TASKS["sft"], byte_tokenizer(), arguments, seed=0)


def test_sources_of_every_kind_are_read_and_columns_renamed(tmp_path):
    rows = [{"q": "1+1=", "a": "2", "prompt": "no", "n": n} for n in range(3)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "x.jsonl", rows)
    columns = {"prompt": "q", "completion": "a"}
    alpaca = jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "say", "input": "", "output": "hi"}])
    mixture = loaded(
        [
            {"path": jsonl(tmp_path / "file.jsonl", rows), "columns": columns, "max_samples": 2},
            {"path": str(tmp_path / "saved"), "columns": columns},
            {"path": str(tmp_path / "splits"), "columns": columns, "split": "test"},
            {"path": str(tmp_path / "folder"), "columns": columns, "split": "train[:1]", "name": "sliced"},
            {"path": alpaca, "format": "alpaca"},
        ]
    )
    assert mixture.names == ("file", "saved", "splits", "sliced", "alpaca")
    assert mixture.order_description == (
        "2 of 2 samples of rows of file.jsonl, 3 of 3 samples of rows of saved, 1 of 1 samples of rows of splits, "
        "1 of 1 samples of rows of folder, 1 of 1 samples of rows of alpaca.jsonl"
    )
    assert np.bincount(mixture.sources).tolist() == [2, 3, 1, 1, 1]
    texts = {byte_tokenizer().decode(mixture[place]["input_ids"]) for place in range(7)}
    assert texts == {"1+1=2<|eos|>"}


TALK = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "old"}]


def test_columns_that_entries_and_the_run_name_win_over_others(tmp_path):
    rows = [{"messages": TALK, "q": "1+1=", "a": "2"}]
    talk = jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}])
    renamed = {"path": jsonl(tmp_path / "rows.jsonl", rows), "columns": {"prompt": "q", "completion": "a"}}
    shaped = renamed | {"name": "shaped", "columns": {"instruction": "q", "output": "a"}}
    mixture = loaded([renamed, shaped, {"path": talk}])
    texts = [byte_tokenizer().decode(mixture[place]["input_ids"]) for place in range(3)]
    assert texts[0] == "1+1=2<|eos|>" and ["old" in text for text in texts] == [False, False, True]
    plain = {"path": renamed["path"]}
    mixture = loaded([plain, {"path": talk}], prompt_column="q", completion_column="a")
    texts = [byte_tokenizer().decode(mixture[place]["input_ids"]) for place in range(2)]
    assert texts[0] == "1+1=2<|eos|>" and "old" in texts[1]
    with pytest.raises(
        McaError, match=r"^datasets, rows: no column 'x', which completion_column names .*messages"
    ):
        loaded([plain, {"path": talk}], completion_column="x")
    with pytest.raises(
        McaError, match=r"^datasets, rows: columns: prompt, completion: format messages does not"
    ):
        loaded([renamed | {"format": "messages"}])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"path": "a.jsonl"}, {"path": "b/a.jsonl"}], "datasets: two are called a; set name"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "datasets: some entries have a weight and some do not"),
        ([{"path": "a", "weigth": 1}], "datasets, entry 0: unknown key 'weigth'; did you mean 'weight'"),
        (
            [{"path": "a", "zzzz": 1}],
            "datasets, entry 0: unknown key 'zzzz'; its keys are path, name, split, subset, revision, columns, format, "
            "weight, max_samples",
        ),
        (
            [{"path": "a", "data_format": "text"}],
            "datasets, entry 0: data_format: is called format in an entry; set that instead",
        ),
        ([{"path": "a", "weight": 0}], "datasets, entry 0: weight is 0.0; expected a number above 0"),
        ([{"weight": 1}], "datasets, entry 0: missing path"),
    ],
)
def test_entries_that_are_wrong_are_one_line(entries, message):
    with pytest.raises(McaError, match=message):
        parse_sources(entries)


def test_a_directory_that_is_a_pattern_is_refused(tmp_path):
    (tmp_path / "[v1]").mkdir()
    jsonl(tmp_path / "[v1]" / "x.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    with pytest.raises(
        McaError, match=r"datasets, \[v1\]: .*v1.: datasets treats .* as a pattern; rename it, or"
    ):
        loaded([{"path": str(tmp_path / "[v1]")}])
    assert len(loaded([{"path": str(tmp_path / "[v1]" / "x.jsonl")}])) == 1


def test_columns_change_places_and_folders_have_dots(tmp_path):
    rows = [{"prompt": "2", "completion": "1+1=", "text": "no"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "v1.0")
    columns = {"prompt": "completion", "completion": "prompt"}
    mixture = loaded([{"path": str(tmp_path / "v1.0"), "columns": columns}])
    sample = mixture[0]
    assert byte_tokenizer().decode(sample["input_ids"]) == "1+1=2<|eos|>"
    assert byte_tokenizer().decode(sample["input_ids"][sample["labels"] != -100]) == "2<|eos|>"
    with pytest.raises(McaError, match="a column of the dataset is named twice"):
        loaded([{"path": str(tmp_path / "v1.0"), "columns": {"prompt": "text", "completion": "text"}}])


def test_a_directory_with_configurations_is_read_by_subset(tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("a", "b"):
        jsonl(folder / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(3)])
    configurations = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("a", "b"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")
    path = str(folder)
    mixture = loaded(
        [
            {"path": path, "subset": "b", "name": "b", "split": "train[:2]"},
            {"path": path, "subset": "a", "name": "a", "max_samples": 1},
        ]
    )
    texts = [byte_tokenizer().decode(mixture[place]["input_ids"]) for place in range(3)]
    assert sorted(texts) == ["a0<|eos|>", "b0<|eos|>", "b1<|eos|>"]
    with pytest.raises(
        McaError, match=r"datasets, both: .*both cannot be read as a dataset: .*'c' not found"
    ):
        loaded([{"path": path, "subset": "c"}])
    with pytest.raises(
        McaError, match=r"datasets, both: .*both cannot be read as a dataset: Config name is miss"
    ):
        loaded([{"path": path}])


def test_a_text_in_a_directory_is_a_document_and_files_without_a_split_are_told(tmp_path, caplog):
    (tmp_path / "books").mkdir()
    (tmp_path / "chats").mkdir()
    (tmp_path / "books" / "a.txt").write_text("one\n\ntwo\n")
    jsonl(tmp_path / "chats" / "train.jsonl", [{"text": "x"}])
    jsonl(tmp_path / "chats" / "more.jsonl", [{"text": "y"}])
    (text,) = loaded([{"path": str(tmp_path / "books")}])
    assert byte_tokenizer().decode(text["input_ids"]) == "one\n\ntwo\n<|eos|>"
    assert not caplog.text
    assert len(loaded([{"path": str(tmp_path / "chats")}])) == 1
    assert (
        "1 file not read (more.jsonl, ...), because other files are named as splits (train, test, validation)"
        in caplog.text
    )


@pytest.mark.parametrize("given", [{"split": "test"}, {"subset": "a"}, {"revision": "v1"}])
def test_what_a_file_does_not_have_is_refused_and_not_ignored(given, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    for path, what in ((file, "a file"), (str(tmp_path / "saved"), "a")):
        with pytest.raises(
            McaError, match=f"{path} is {what}.*, which has no {next(iter(given))}; remove it"
        ):
            loaded([{"path": path, **given}])


def test_a_split_or_a_column_that_is_not_there_is_named(tmp_path):
    saved = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    (tmp_path / "py").mkdir()
    for content in ("it is empty", "it has 2 that end in .py"):
        with pytest.raises(
            McaError, match=rf"py has no .jsonl, .json, .parquet, .arrow or .txt file \({content}\)"
        ):
            loaded([{"path": str(tmp_path / "py")}])
        for name in "ab":
            (tmp_path / "py" / f"{name}.py").touch()
    with pytest.raises(McaError, match=r"datasets, splits: .* has no split 'dev' \(splits: train\)"):
        loaded([{"path": str(tmp_path / "splits"), "split": "dev"}])
    with pytest.raises(McaError, match=r"datasets, splits: columns: no column q \(columns: text\)"):
        loaded([{"path": str(tmp_path / "splits"), "columns": {"text": "q"}}])


def test_a_source_of_one_sample_repeats_as_often_as_it_is_drawn():
    mixture = Mixture([part(0, 1), part(100, 3)], ["a", "b"], [1, 1], 7)
    assert mixture.epochs == (2, 2 / 3)
    assert mixture.describe() == "a 2 of 1 sample (2.00 epochs), b 2 of 3 samples (0.67 epochs)"
