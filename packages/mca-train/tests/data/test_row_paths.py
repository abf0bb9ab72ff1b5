"""Rows of local files open what they name; rows of the Hub and of addresses only what is in the same place."""

import json

import datasets
import fsspec
import pytest
from huggingface_hub import constants
from image_samples import asked, load, placed, reader, text

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.row_paths import row_paths
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized

PAGES = datasets.config.HF_ENDPOINT

OPENED = [
    ("https://h/d/rows.jsonl?sig=s", "a.png", "https://h/d/a.png"),
    ("https://h/d/rows.jsonl", "b/../a.png", "https://h/d/a.png"),
    ("https://me:pw@h/d/rows.jsonl", "https://H/d/b/a.png?sig=t", "https://H/d/b/a.png?sig=t"),
    ("https://h/d/rows.jsonl", "https://h/d/b/%2e%2e/a.png", "https://h/d/b/%2e%2e/a.png"),
    ("https://h/rows.jsonl", "https://h/e/a.png", "https://h/e/a.png"),
    ("s3://b/d/rows.jsonl", "s3://b/d/e/a.png", "s3://b/d/e/a.png"),
    ("hf://datasets/o/n@v1/d/rows.jsonl", "../e/a.png", "hf://datasets/o/n@v1/e/a.png"),
    ("hf://datasets/o/n/rows.jsonl", "hf://datasets/o/n@main/a.png", "hf://datasets/o/n@main/a.png"),
    (f"{PAGES}/datasets/o/n/resolve/main/d/rows.jsonl", "a.png", "hf://datasets/o/n@main/d/a.png"),
    ("o/n", f"{PAGES}/datasets/o/n/resolve/v1/a.png", f"{PAGES}/datasets/o/n/resolve/v1/a.png"),
    ("o/n", "d/a.png", "hf://datasets/o/n/d/a.png"),
    ("/data/rows.jsonl", "../a.png", "/data/../a.png"),
    ("/data/rows.jsonl", "/other/a.png", "/other/a.png"),
    ("/data/rows.jsonl", "s3://b/a.png", "s3://b/a.png"),
    ("file:///data/rows.jsonl", "a.png", "/data/a.png"),
    ("simplecache::file:///data/rows.jsonl", "/other/a.png", "/other/a.png"),
    ("simplecache::s3://b/d/rows.jsonl", "s3://b/d/a.png", "s3://b/d/a.png"),
]


@pytest.mark.parametrize(("file", "named", "opened"), OPENED)
def test_rows_open_files_of_the_same_place(file, named, opened):
    assert row_paths([file], None).resolve(named) == opened


OUTSIDE = {
    "https://h/d/rows.jsonl": (
        *(
            "/etc/passwd",
            "../a.png",
            "a/../../b.png",
            "..%2Fa.png",
            "%252e%252e/a.png",
            "..\\a.png",
            "//other/a.png",
        ),
        *("https://h/a.png", "https://h/dd/a.png", "https://h/d/../a.png", "https://h/d/%2e%2e/a.png"),
        *("http://h/d/a.png", "https://h:8080/d/a.png", "https://other/d/a.png", "https://h@other/d/a.png"),
        *("https://other\\@h/d/a.png", "s3://h/d/a.png", "hf://datasets/o/n/a.png"),
    ),
    "s3://b/d/rows.jsonl": (
        "/etc/passwd",
        "../a.png",
        "s3://b/a.png",
        "s3://other/d/a.png",
        "s3://b/d/%2e%2e/a.png",
    ),
    "hf://datasets/o/n@v1/d/rows.jsonl": (
        *("/etc/passwd", "../../a.png", "../../../o/m/a.png", "hf://datasets/o/m/a.png", "hf://o/n/a.png"),
        *("hf://datasets/o/n@..%2F../a.png", f"{PAGES}/datasets/o/n/resolve/../../m/a.png"),
    ),
    "o/n": ("/etc/passwd", "../a.png", "hf://datasets/o/m/a.png", f"{PAGES}/datasets/o/m/resolve/main/a.png"),
}


@pytest.mark.parametrize(
    ("file", "named"), [(file, named) for file, some in OUTSIDE.items() for named in some]
)
def test_rows_that_are_not_local_open_nothing_else(file, named):
    with pytest.raises(McaError, match=r"is outside of .*; expected a relative path or a URL there; fetch"):
        row_paths([file], None).resolve(named)


@pytest.mark.parametrize("file", ["/data/rows.jsonl", "https://h/d/rows.jsonl", "o/n"])
@pytest.mark.parametrize(
    ("named", "reported"),
    [
        ("simplecache::https://h/d/a.png", "is a chain of protocols; expected a path or one URL"),
        ("https://h/d/a.png::/etc/passwd", "is a chain of protocols"),
        ("file:///etc/passwd", r"begins with file://; expected a path; write /etc/passwd$"),
        ("local:///etc/passwd", r"begins with local://; expected a path; write /etc/passwd$"),
    ],
)
def test_no_row_names_a_chain_or_a_local_protocol(file, named, reported):
    with pytest.raises(McaError, match=reported):
        row_paths([file], None).resolve(named)


def test_rows_from_elsewhere_stay_in_the_image_folder_through_links_too(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").touch()
    (tmp_path / "secret").touch()
    (folder / "link.png").symlink_to(tmp_path / "secret")
    paths = row_paths(["https://h/d/rows.jsonl"], str(folder))
    assert paths.resolve("a.png") == str(folder / "a.png")
    assert paths.resolve("https://h/d/b.png") == "https://h/d/b.png"
    for named in ("link.png", "../secret", str(folder / "a.png")):
        with pytest.raises(McaError, match=f"is outside of {folder} and https://h/d"):
            paths.resolve(named)
    assert row_paths(["/data/rows.jsonl"], str(folder)).resolve("link.png") == str(folder / "link.png")
    assert row_paths(["https://h/d/rows.jsonl"], "s3://b/i").resolve("a.png") == "s3://b/i/a.png"


def test_a_file_at_an_address_makes_the_rows_of_a_local_one_as_strict():
    paths = row_paths(["/data/rows.jsonl", "https://h/d/rows.jsonl"], None)
    assert paths.resolve("https://h/d/a.png") == "https://h/d/a.png"
    for named, reported in (("/data/a.png", "is outside of https://h/d"), ("a.png", "is a relative path")):
        with pytest.raises(McaError, match=reported):
            paths.resolve(named)


def test_what_datasets_fetched_with_rows_of_the_hub_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    snapshot = tmp_path / "datasets--o--n" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "out.png").symlink_to("/etc/passwd")
    paths = row_paths(["o/n"], None, "refs/pr/1")
    assert paths.folder == "hf://datasets/o/n@refs%2Fpr%2F1"
    for file in (snapshot / "a.png", tmp_path / "downloads" / "x" / "a.png"):
        assert paths.resolve(str(file)) == str(file)
    for file in (snapshot / "out.png", snapshot / "../../../a.png", tmp_path / "datasets--o--m" / "a.png"):
        with pytest.raises(McaError, match="is outside of"):
            paths.resolve(str(file))


def test_the_row_that_opens_something_else_is_named(tokenizer, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(tmp_path / "cache"))

    def loaded(*paths):
        with fsspec.open("memory://rows/d/rows.jsonl", "wt") as stream:
            stream.writelines(
                json.dumps(asked({"type": "image", "path": path}, text("?"))) + "\n" for path in paths
            )
        given, images = DataArguments(model_name_or_path="m"), reader(tokenizer, folder)
        return load_tokenized(TASKS["sft"], ["memory://rows/d/rows.jsonl"], tokenizer, given, images=images)

    with fsspec.open("memory://rows/d/wide.png", "wb") as stream:
        stream.write((folder / "wide.png").read_bytes())
    assert [place[1:] for place in placed(loaded("wide.png")[0])] == [(2, 3)]
    with pytest.raises(
        McaError, match=rf"^train_file, row 1: image {folder}/wide.png is outside of memory://rows/d"
    ):
        loaded("wide.png", str(folder / "wide.png"))
    with pytest.raises(McaError, match=r"^train_file, row 0: image file:///a.png begins with file://"):
        load([asked({"type": "image", "path": "file:///a.png"})], tokenizer, folder)
