"""Files at addresses: what is needed to open them, and that they are read as they are now.

``memory://`` stands for those whose server does not say when a file has changed; S3 and Google's storage are in
``integration_tests/cli/test_clients.py``.
"""

import json
import sys
from types import SimpleNamespace

import datasets
import fsspec
import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError, UsageError
from mca_train.config.arguments import PairArguments
from mca_train.data import files, urls
from mca_train.data.files import check_file, load_rows
from mca_train.data.image_files import ImageFile
from mca_train.data.sources import Source, load_source
from mca_train.data.urls import download, read_url, require_readable, to_hub_url, translate_url_errors
from mca_train.run.early_rules import data_files
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized

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
    reported = f"{address} needs the package {package}, which is not installed; pip install {installed}"
    for key in ("train_file", "datasets"):
        values = {key: [address] if key == "train_file" else [{"path": address}]}
        settings = SimpleNamespace(data=PairArguments(model_name_or_path="m", **values))
        assert list(data_files(TASKS["sft"], settings)) == [f"{key}: {reported}"]
    with pytest.raises(UsageError, match=f"image: {address}.*{package}"):
        ImageFile(address).size()


def test_the_key_of_tokenized_samples_is_of_the_content_they_are_made_of(tmp_path, monkeypatch):
    arguments = PairArguments(model_name_or_path="m", tokenized_cache=str(tmp_path / "tokens"))
    asked = []

    def replaced_behind(file, key):
        asked.append(file)
        copy = download(file, key)
        written("new", "er", "est")  # while the run goes on
        download(file, key)  # by another process
        return copy

    monkeypatch.setattr(files, "download", replaced_behind)
    written("old")
    for _ in range(2):
        assert len(load_tokenized(TASKS["sft"], [ADDRESS], byte_tokenizer(), arguments)) == 1
        written("old")
    assert len(asked) == 2


def test_the_same_content_is_the_same_copy():
    written("old")
    first = download(ADDRESS, "train_file")
    made, changed = first.read_bytes(), first.stat().st_mtime_ns
    assert download(ADDRESS, "train_file") == first and first.stat().st_mtime_ns == changed
    written("new")
    assert download(ADDRESS, "train_file") != first and first.read_bytes() == made


@pytest.mark.parametrize(
    ("address", "is_forced"),
    [("hf://buckets/o/b/a.jsonl", True), ("hf://datasets/o/d/a.jsonl", False)],
)
def test_what_has_no_version_is_fetched_every_time(address, is_forced, tmp_path, monkeypatch):
    found = []
    (tmp_path / "a").write_text("{}")

    class Downloads:
        def __init__(self, download_config):
            found.append(download_config.force_download)

        def download(self, _):
            return str(tmp_path / "a")

    monkeypatch.setattr(datasets, "DownloadManager", Downloads)
    system = SimpleNamespace(info=lambda path: {"name": path, "size": 2, "xet_hash": "a"})
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda file: (system, file))
    download(address, "train_file")
    assert found == [is_forced]


class Answered(Exception):
    def __init__(self, status):
        super().__init__(f"{status} of https://a.b/c.jsonl?X-Amz-Signature=secret")
        self.status = status


ABSENT = ": there is no such file or bucket, or no right to see it; check the URL and the credentials"
CHECK = "; check the URL, the credentials and the network"


@pytest.mark.parametrize(
    ("cause", "reported"),
    [
        (None, ABSENT),
        (KeyError("c"), ABSENT),
        (Answered(404), ABSENT),
        (Answered(403), f" cannot be fetched: 403 of https://a.b/c.jsonl{CHECK}"),
        (ConnectionRefusedError("refused"), f" cannot be fetched: refused{CHECK}"),
    ],
)
def test_that_a_client_calls_everything_missing_is_not_passed_on(cause, reported):
    file = "https://me:secret@a.b/c.jsonl?X-Amz-Signature=secret"
    for block in (
        translate_url_errors("train_file", file),
        files.translate_read_errors("train_file", file, "json"),
    ):
        with pytest.raises(McaError) as caught, block:
            raise FileNotFoundError(file) from cause
        assert str(caught.value) == f"train_file: https://...@a.b/c.jsonl{reported}"


def test_the_offline_mode_of_the_hub_is_named(monkeypatch):
    written("old")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        McaError, match=f"^train_file: {ADDRESS} cannot be fetched in the offline .*unset HF_HUB_"
    ):
        download(ADDRESS, "train_file")


def test_a_page_of_the_hub_is_read_by_the_client_that_has_its_token(monkeypatch):
    page = f"{datasets.config.HF_ENDPOINT}/datasets/o/private/resolve/main/a.jsonl"
    wanted = "hf://datasets/o/private@main/a.jsonl"
    assert to_hub_url(page) == to_hub_url(f"{page}?download=true") == wanted
    assert to_hub_url("https://a.b/datasets/o/resolve/a?b") == "https://a.b/datasets/o/resolve/a?b"
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    check_file(page, "train_file")  # needs no package
    opened = []

    def seen(file, *_, **__):
        opened.append(file)
        raise FileNotFoundError(file)

    monkeypatch.setattr("fsspec.core.url_to_fs", seen)
    monkeypatch.setattr("fsspec.open", seen)
    monkeypatch.setattr(urls, "_has_version", lambda file: seen(file))
    reading = (lambda: require_readable(page, "k"), lambda: read_url(page), lambda: download(page, "k"))
    for read in (*reading, lambda: files.require_shallow_json(page, "k")):
        with pytest.raises((McaError, FileNotFoundError)):
            read()
    assert opened == [wanted] * 4


@pytest.mark.parametrize(
    ("url", "clients"),
    [("https://h/a", {"https"}), ("zip://a::http://h/b", {"http"}), ("zip://a::file:///b", set())],
)
def test_web_clients_alone_use_the_proxy(url, clients, monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda file, **options: (options, file))
    options, file = urls._open_filesystem(url)
    assert (options, file) == ({client: {"client_kwargs": {"trust_env": True}} for client in clients}, url)


def test_a_presigned_address_has_the_ending_of_its_path(monkeypatch):
    monkeypatch.setattr(urls, "require_client", lambda *_: None)
    monkeypatch.setattr(files, "require_client", lambda *_: None)
    query = "?X-Amz-Signature=secret"
    assert check_file(f"https://h/rows.jsonl.gz{query}", "train_file")[0] == "json"
    assert check_file("https://h/get?file=rows.parquet", "train_file")[0] == "parquet"
    assert Source(path=f"https://h/rows.jsonl{query}").display_name == "rows"
    with pytest.raises(McaError, match=r"^train_file: https://h/rows\.csv ends in '\.csv'") as caught:
        check_file(f"https://h/rows.csv{query}", "train_file")
    assert "secret" not in str(caught.value)


def test_what_a_file_has_not_is_refused_whatever_it_is_called(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    arguments = PairArguments(model_name_or_path="m")
    for name in ("subset", "revision", "split"):
        other = "test" if name == "split" else "train"
        with pytest.raises(UsageError, match=f"which has no {name}; remove it") as caught:
            load_source(Source(path=str(tmp_path / "a.jsonl"), **{name: other}), "datasets", arguments)
        assert ("max_samples" in str(caught.value)) == (name == "split")
