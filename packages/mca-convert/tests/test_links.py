"""Links in a source: those of the Hugging Face cache are followed, those that lead out of the directory are not."""

import shutil
from pathlib import Path

from files import refused

from mca_convert.cli import main


def test_link_out_of_the_directory(source: Path, tmp_path: Path, capsys) -> None:
    (source / "model.safetensors").rename(tmp_path / "elsewhere")
    (source / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "leads out of the directory" in refused(source, tmp_path, capsys)


def test_a_small_file_that_links_out_of_the_directory(source: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "secret").write_text("not to be published")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    error = refused(source, tmp_path, capsys)
    assert "tokenizer.json: leads out of the directory" in error


def test_links_of_the_hugging_face_cache_are_followed(tiny, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in tiny("llama").iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert main(["--checkpoint_path", str(snapshot), "--output_path", str(tmp_path / "out")]) == 0


def test_blobs_that_all_models_of_the_cache_share_are_followed(tiny, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    shared = tmp_path / "blobs"
    for folder in (snapshot, blobs, shared):
        folder.mkdir(parents=True)
    for file in tiny("llama").iterdir():
        shutil.copy(file, shared / file.name)
        (blobs / file.name).symlink_to(shared / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    command = ["--checkpoint_path", str(snapshot), "--output_path", str(tmp_path / "out")]
    assert main(command) == 1  # any folder beside may be called so
    (shared / ".huggingface-shared-blobs").touch()
    assert main(command) == 0
