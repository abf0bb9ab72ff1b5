"""How a model takes its place in a directory that holds other things too."""

from pathlib import Path

from mca_models.checkpoint.side_files import OF_A_RUN
from mca_train.checkpoint.model import _move_up, _put_hf_in_place


def write(folder: Path, text: str, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_model_replaces_nothing_that_the_run_wrote(tmp_path: Path) -> None:
    folder = write(tmp_path, "of the run", *OF_A_RUN)
    write(folder, "of the earlier model", "config.json")
    _move_up(write(folder / ".model", "of the model", "config.json", *OF_A_RUN), folder)
    assert contents(folder) == dict.fromkeys(OF_A_RUN, "of the run") | {"config.json": "of the model"}


def test_a_model_leaves_nothing_of_an_earlier_adapter(tmp_path: Path) -> None:
    adapter = ("adapter_config.json", "adapter_model.safetensors")
    _move_up(write(tmp_path / ".model", "first", adapter[0], "config.json"), tmp_path)
    _put_hf_in_place(write(tmp_path / ".hf", "first", *adapter), tmp_path)
    assert set(contents(tmp_path / "hf")) == set(adapter)
    write(tmp_path / "hf", "notes", "README.md")
    _put_hf_in_place(write(tmp_path / ".hf", "second", "config.json"), tmp_path)
    assert contents(tmp_path / "hf") == {"config.json": "second", "README.md": "notes"}
    (tmp_path / "hf").rename(tmp_path.with_name("looked-at"))
    assert set(contents(tmp_path)) == {adapter[0], "config.json"}
    _move_up(write(tmp_path / ".model", "second", "config.json"), tmp_path)
    assert contents(tmp_path) == {"config.json": "second"}
