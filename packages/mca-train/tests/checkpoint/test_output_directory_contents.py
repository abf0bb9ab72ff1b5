"""Writing a model into a directory that contains other files."""

from pathlib import Path

import pytest

from mca_train.checkpoint.model import _LATEST, _install_hf, _move_up


def write(folder: Path, text: str, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_model_leaves_nothing_of_an_earlier_adapter(tmp_path: Path) -> None:
    adapter = ("adapter_config.json", "adapter_model.safetensors")
    _move_up(write(tmp_path / ".model", "first", adapter[0], "config.json"), tmp_path)
    _install_hf(write(tmp_path / ".hf", "first", *adapter), tmp_path)
    assert set(contents(tmp_path / "hf")) == set(adapter)
    write(tmp_path / "hf", "notes", "README.md")
    _install_hf(write(tmp_path / ".hf", "second", "config.json"), tmp_path)
    assert contents(tmp_path / "hf") == {"config.json": "second", "README.md": "notes"}
    (tmp_path / "hf").rename(tmp_path.with_name("looked-at"))
    assert set(contents(tmp_path)) == {adapter[0], "config.json"}
    _move_up(write(tmp_path / ".model", "second", "config.json"), tmp_path)
    assert contents(tmp_path) == {"config.json": "second"}


def test_the_file_that_completes_a_model_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (order.append(path.name), replace(path, to))[1])
    _move_up(write(tmp_path / ".model", "first", _LATEST, "a.json", "z.json"), tmp_path)
    assert sorted(order[:2]) == ["a.json", "z.json"] and order[2:] == [_LATEST]
