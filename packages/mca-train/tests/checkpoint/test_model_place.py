"""Writing a model into a directory that contains other files."""

from pathlib import Path

from mca_train.checkpoint.model import _install_hf, _move_up


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
