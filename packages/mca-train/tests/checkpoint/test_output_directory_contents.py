"""Writing a model into a directory that contains other files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError, UsageError
from mca_train.checkpoint import model as model_files
from mca_train.checkpoint.model import (
    _LATEST,
    ModelWriter,
    _install_hf,
    _move_up,
    _require_same,
    require_format,
)


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


@pytest.mark.parametrize("hf", [False, True])
@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_a_model_is_moved_up_once_all_its_files_are_written(
    hf: bool, has_tokenizer: bool, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "run_on_first_rank", lambda call: call())
    calls: list[Any] = []
    pending = SimpleNamespace(done=lambda: len(calls) > 1, finish=lambda: calls.append("finish"))

    def save(name: str, result: Any = None) -> Any:
        def write_model(folder: Path, **options: Any) -> Any:
            calls.append((name, folder.name, options))
            write(folder, name, "config.json")
            return result

        return write_model

    model: Any = SimpleNamespace(
        save_pretrained=save("mca", pending if background else None), save_pretrained_as_hf=save("hf")
    )
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda folder: write(folder, "words", "tokenizer.json"))
    made = ModelWriter(model, tmp_path, tokenizer if has_tokenizer else None, hf=hf, ckpt_format="dist")  # type: ignore[arg-type]
    exported = [("hf", ".hf", {"overwrite": True})] * hf
    assert calls == [*exported, ("mca", ".model", {"overwrite": True, "ckpt_format": "dist"})]
    assert made.done() is (not background or hf)
    assert not (tmp_path / "config.json").exists()
    made.finish()
    assert calls[len(exported) + 1 :] == ["finish"] * background
    words = {"tokenizer.json": "words"} if has_tokenizer else {}
    if hf:
        assert contents(tmp_path / "hf") == {"config.json": "hf"} | words
        (tmp_path / "hf").rename(tmp_path.with_name(f"{tmp_path.name}-hf"))
    assert contents(tmp_path) == {"config.json": "mca"} | words


class Adapted:
    """A model with an adapter."""


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("ckpt_format", ["mca", "torch_dist"])
def test_an_adapter_has_one_format(adapted: bool, ckpt_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "PeftModels", Adapted)
    model: Any = Adapted() if adapted else object()
    if adapted and ckpt_format != "mca":
        with pytest.raises(McaError, match="ckpt_format torch_dist is not supported with an adapter"):
            require_format(model, ckpt_format)
    else:
        require_format(model, ckpt_format)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, None),
        ({"dtype": "float32", "layout": 2}, None),
        ({"num_layers": 3}, "num_layers is 3 there, 2 here"),
        ({"num_layers": None}, "num_layers is None there, 2 here"),
        ({"other": 1}, "other is 1 there, None here"),
        (
            {"model_type": "b", "num_layers": 3, "a": 1, "z": 2},
            "model_type is b there, a here; a is 1 there, None here; num_layers is 3 there, 2 here",
        ),
    ],
)
def test_the_first_three_differences_of_another_model_are_named(
    saved: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    fields = {"model_type": "a", "num_layers": 2, "dtype": "bfloat16", "layout": 1}
    mine: Any = SimpleNamespace(to_fields=lambda: fields)
    theirs: Any = SimpleNamespace(to_fields=lambda: fields | saved)
    if words is None:
        _require_same(theirs, mine, tmp_path)
        return
    with pytest.raises(UsageError) as error:
        _require_same(theirs, mine, tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path}: holds another model than this run's: {words}; set model_name"
    )


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("has_config", [False, True])
def test_weights_are_loaded_into_a_model_of_the_same_settings(
    adapted: bool, has_config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter may be a directory of PEFT, which has no settings of its model."""
    calls: list[Any] = []
    source = SimpleNamespace(config="theirs")
    monkeypatch.setattr(model_files, "PeftModels", Adapted)
    monkeypatch.setattr(model_files, "open_checkpoint", lambda folder: source)
    monkeypatch.setattr(model_files, "_require_same", lambda *given: calls.append(("same", *given)))
    monkeypatch.setattr(model_files.McaModelConfig, "from_json", lambda *given: given)
    for name in ("require_same_names", "from_source"):
        monkeypatch.setattr(model_files.fill, name, lambda *given, name=name: calls.append((name, *given)))
    if has_config:
        (tmp_path / model_files.FILE_NAME).write_text("{}")
    model: Any = Adapted() if adapted else SimpleNamespace()
    model.config, model.load_pretrained = "mine", lambda folder: calls.append(("load", folder))
    model.local_params, model.rank_context = (lambda: "params"), SimpleNamespace(layout="l", coordinates="c")
    model_files.load_weights(model, tmp_path)
    read = ("{}", str(tmp_path / model_files.FILE_NAME))
    own = [("same", read, "mine", tmp_path)] * has_config
    whole = [
        ("same", "theirs", "mine", tmp_path),
        ("require_same_names", source, "mine", str(tmp_path)),
        ("from_source", source, "params", "l", "c"),
    ]
    assert calls == ([*own, ("load", tmp_path)] if adapted else whole)
