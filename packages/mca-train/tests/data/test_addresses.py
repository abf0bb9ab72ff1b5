"""Files at addresses: what is needed to open them, and that they are read as they are now.

``memory://`` stands for those whose server does not say when a file has changed; S3 and Google's storage are in
``integration_tests/test_clients.py``.
"""

import json
import sys
from types import SimpleNamespace

import datasets
import fsspec
import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError, UsageError
from mca_train.config.columns import PairArguments
from mca_train.data.files import load_rows
from mca_train.data.image_files import ImageFile
from mca_train.run.checks import data_problems
from mca_train.tasks.load import load_tokenized
from mca_train.tasks.table import TASKS

ADDRESS = "memory://rows/a.jsonl"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "cache"))


def written(*texts):
    with fsspec.open(ADDRESS, "wt") as stream:
        stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    arguments = PairArguments(model_name_or_path="m", tokenized_cache=str(tmp_path / "tokens"))
    for texts in (["old"], ["new", "er"]):
        written(*texts)
        assert load_rows([ADDRESS], "train_file", arguments)["text"] == texts
        samples = load_tokenized(TASKS["sft"], [ADDRESS], byte_tokenizer(), arguments)
        assert len(samples) == len(texts)
    assert len([path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]) == 2  # kept by content


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://none.jsonl", "train_file: memory://none.jsonl: there is no such file or bucket"),
        ("s4://a/b.jsonl", "train_file: s4://a/b.jsonl: 's4' is no file system that fsspec knows"),
    ],
)
def test_what_is_not_there_is_one_line(address, message):
    with pytest.raises(McaError, match=message):
        load_rows([address], "train_file", PairArguments(model_name_or_path="m"))


@pytest.mark.parametrize(
    ("address", "package", "installed"),
    [
        ("s3://a/b.jsonl", "s3fs", "'mca-train[s3]'"),
        ("simplecache::gs://a/b.jsonl", "gcsfs", "'mca-train[gcs]'"),
        ("oss://a/b.jsonl", "ossfs", "ossfs"),
    ],
)
def test_a_package_that_is_missing_is_named_before_a_run_begins(address, package, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    told = f"{address} needs the package {package}, which is not installed; pip install {installed}"
    for key in ("train_file", "datasets"):
        values = {key: [address] if key == "train_file" else [{"path": address}]}
        settings = SimpleNamespace(data=PairArguments(model_name_or_path="m", **values))
        assert list(data_problems(settings)) == [f"{key}: {told}"]
    with pytest.raises(UsageError, match=f"image: {address}.*{package}"):
        ImageFile(address).size()
