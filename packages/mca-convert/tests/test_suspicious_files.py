"""Files that are none, lead elsewhere, or hold what no model has: one line, at once, before any work."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from files import LAYOUT, damage_header, edit_fields, layout_flags, refused

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_convert.cli import main
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.checkpoint_kinds import open_checkpoint

HF_FILES = (
    "config.json",
    "model.safetensors",
    "generation_config.json",
    "mca_config.json",
)
ITERATION = "iter_0000001"
MCA_FILES = (
    *("mca_config.json", "latest_checkpointed_iteration.txt", ITERATION, f"{ITERATION}/manifest.json"),
    *(f"{ITERATION}/pp_000", f"{ITERATION}/pp_000/tp_00.safetensors", "config.json"),
)


def change_config(source: Path, **change: object) -> Path:
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return source


@pytest.mark.parametrize("name", [*HF_FILES, "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, source: Path, tmp_path: Path, capsys) -> None:
    (source / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (source / "model.safetensors").unlink()
    os.mkfifo(source / name)
    assert f"{name}: not a file but a directory, pipe or device" in refused(source, tmp_path, capsys)
    (source / name).unlink()
    (source / name).symlink_to("/dev/zero")
    assert f"{name}: leads out of the directory" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize("name", MCA_FILES)
def test_links_out_of_an_mca_checkpoint(name: str, source: Path, convert, tmp_path: Path, capsys) -> None:
    mca = convert(source, "mca")
    (mca / name).rename(tmp_path / "elsewhere")
    (mca / name).symlink_to(tmp_path / "elsewhere")
    carried = name == "config.json"  # of an MCA checkpoint it is never read
    if carried:
        convert(mca, "back")
    else:
        assert "leads out of the directory" in refused(mca, tmp_path, capsys)
        (mca / name).unlink()
        (mca / name).symlink_to("nowhere")
        assert name.partition("/")[0] in refused(mca, tmp_path, capsys)


def test_links_of_the_cache_are_followed_from_an_mca_checkpoint(
    source: Path, convert, tmp_path: Path
) -> None:
    mca, snapshot, blobs = convert(source, "mca"), tmp_path / "snapshots/abc", tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(path for path in sorted(mca.rglob("*")) if path.is_file()):
        link = snapshot / file.relative_to(mca)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    convert(snapshot, "back")


SIDE_FILES = {
    "link": (lambda file: file.symlink_to("nowhere"), "a link to nothing"),
    "pipe": (os.mkfifo, "not a file but"),
    "loop": (lambda file: file.symlink_to(file.name), "cannot be"),
}


@pytest.mark.parametrize("kind", SIDE_FILES)
@pytest.mark.parametrize("command", ["convert", "plan"])
def test_side_files_that_cannot_be_copied(
    kind: str, command: str, source: Path, tmp_path: Path, capsys
) -> None:
    make, message = SIDE_FILES[kind]
    make(source / "tokenizer.json")
    if command == "convert":
        assert message in refused(source, tmp_path, capsys)
    else:
        assert main(["plan", "--checkpoint_path", str(source)]) == 1
        assert message in capsys.readouterr().out


def test_a_side_file_that_cannot_be_closed_is_named(source: Path, tmp_path: Path, monkeypatch) -> None:
    class Torn(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError(errno.EIO, "Input/output error")

    plain = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: Torn(fd) if mode == "rb" else plain(fd, mode))
    with pytest.raises(McaError, match=r"generation_config\.json: cannot be read \(Input/output error\)"):
        copy_side_files(source, tmp_path / "out")


def test_a_side_file_replaces_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "generation_config.json").write_text("its own")
    assert "generation_config.json" not in copy_side_files(source, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == "its own"


def test_all_of_a_tokenizer_goes_along_both_ways(source: Path, convert) -> None:
    templates = source / "additional_chat_templates"
    templates.mkdir()
    for name in ("tool_use", "rag"):
        (templates / f"{name}.jinja").write_text(name)
    with (source / "vocabulary.txt").open("wb") as file:
        file.truncate(65 << 20)
    back = convert(convert(source, "mca"), "back")
    assert {file.name: file.read_text() for file in (back / templates.name).iterdir()} == {
        "tool_use.jinja": "tool_use",
        "rag.jinja": "rag",
    }
    assert (back / "vocabulary.txt").stat().st_size == 65 << 20


DEEP = {"x": json.loads("[" * 100 + "]" * 100)}


@pytest.mark.parametrize(("change", "message"), [
    ({"x": "\ud800"}, "half a character"),
    ({"x": {"\udfff": 1}}, "half a character"),
    (DEEP, "nested more than"),
    ({"rope_parameters": {"rope_type": "bogus"}}, "rope_type 'bogus' is not supported; supported: default, linear"),
    ({"rope_scaling": {"rope_type": "bogus"}}, "rope_type 'bogus' is not supported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor must be a positive number"),
    ({"rope_parameters": {"rope_theta": float("inf")}}, "rotary_base must be a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps must be at least 0"),
    ({"max_position_embeddings": -5}, "max_position_embeddings must be at least 1"),
    ({"max_position_embeddings": 10**18}, "max_position_embeddings must be at most"),
    ({"num_hidden_layers": float("inf")}, "num_hidden_layers must be"),
    ({"num_hidden_layers": 10**5}, "num_hidden_layers must be at most 4096"),
    ({"hidden_size": 10**18}, "hidden_size must be at most"),
    ({"vocab_size": 10**18}, "vocab_size must be at most"),
    ({"intermediate_size": 10**18}, "intermediate_size must be at most"),
    ({"head_dim": 10**18}, "head_dim must be at most"),
    ({"attention_dropout": 2.0}, "attention_dropout must be at least 0 and below 1"),
])  # fmt: skip
def test_configurations_that_no_model_has(
    change: dict, message: str, source: Path, tmp_path: Path, capsys
) -> None:
    change_config(source, **change)
    error = refused(source, tmp_path, capsys)
    assert message in error and f"{source / 'config.json'}: " in error
    (source / "model.safetensors").unlink()
    assert main(["plan", "--checkpoint_path", str(source)]) == 1
    assert message in capsys.readouterr().out


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "deep": (lambda data: b"[" * 100_000, "nested too deeply"),
    "digits": (lambda data: data.replace(b"{", b'{"x": ' + b"9" * 5000 + b",", 1), "thousands of digits"),
    "no UTF-8": (lambda data: b"\xff" + data, "expected UTF-8"),
    "list": (lambda data: b"[]", "expected a JSON object, not list"),
}


@pytest.mark.parametrize("how", BYTES)
@pytest.mark.parametrize("name", ["config.json", "mca_config.json", f"{ITERATION}/manifest.json"])
def test_texts_that_are_no_json(how: str, name: str, source: Path, convert, tmp_path: Path, capsys) -> None:
    spoil, message = BYTES[how]
    broken = source if name == "config.json" else convert(source, "mca")
    (broken / name).write_bytes(spoil((broken / name).read_bytes()))
    error = refused(broken, tmp_path, capsys)
    assert message in error and str(broken / name) in error


def test_the_configuration_inside_must_be_of_the_same_family(
    source: Path, convert, tmp_path: Path, capsys
) -> None:
    file = convert(source, "mca") / "mca_config.json"
    document = json.loads(file.read_text())
    document["hf_config"]["model_type"] = "qwen2"
    file.write_text(json.dumps(document))
    assert "hf_config has model_type 'qwen2', the model is 'llama'" in refused(file.parent, tmp_path, capsys)


@pytest.mark.parametrize(("case", "change", "message"), [
    ("mixtral", {"moe_ffn_hidden_size": None}, "lacks a size that it needs"),
    ("llama", {"kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}, "kv_lora_rank is"),
])  # fmt: skip
def test_a_configuration_without_a_size(
    case: str, change: dict, message: str, tiny, convert, tmp_path: Path, capsys
) -> None:
    file = convert(tiny(case), "mca") / "mca_config.json"
    document = json.loads(file.read_text())
    edit_fields(document["model"], change)
    file.write_text(json.dumps(document))
    assert message in refused(file.parent, tmp_path, capsys)


NAMES = {
    "NUL": "a\0b",
    "half a character": "a\ud800",
    "escape": "a\x1b[31m",
    "line": "a\nerror: b",
    "long": "a" * 2000,
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_tensors_that_cannot_be_printed(kind: str, source: Path, tmp_path: Path, capsys) -> None:
    rename = damage_header(lambda header: header.update({NAMES[kind]: header.pop("model.norm.weight")}))
    rename(source / "model.safetensors")
    error = refused(source, tmp_path, capsys)
    assert "no name of a tensor" in error and error.rstrip("\n").isprintable() and len(error) < 1000


@pytest.mark.parametrize(("case", "layout"), [
    ("gpt_oss", {"tp": 2}),
    ("olmo2", {"tp": 4}),
    ("minimax_m2", {"tp": 4}),
    ("qwen3_next", {"tp": 4}),
    ("llama", {"tp": 8}),
    ("llama", {"ep": 4}),
    ("mixtral", {"tp": 8, "etp": 1}),
])  # fmt: skip
def test_what_cannot_be_trained_is_not_written(case: str, layout: dict, tiny, tmp_path: Path, capsys) -> None:
    """The converter, the plan and the trainer have one check."""
    source = tiny(case)
    error = refused(source, tmp_path, capsys, *layout_flags(layout))
    assert main(["plan", "--checkpoint_path", str(source), *layout_flags(layout)]) == 1
    out = capsys.readouterr().out
    problems = check_layout(
        open_checkpoint(source).config, ParallelLayout(**{LAYOUT[key]: size for key, size in layout.items()})
    )
    assert problems and all(problem in error and problem in out for problem in problems)
