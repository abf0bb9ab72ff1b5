"""Output of the commands: text, stream, and replaced files."""

import io
import json
import os
import resource
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mca_config.parser import Parser
from mca_config.printable import printable
from mca_convert import output
from mca_convert.cli import main
from mca_convert.commands import _layout
from mca_convert.flags import byte_count, program
from mca_models.storage import atomic


def arguments(source: Path, target: Path) -> list[str]:
    return ["--checkpoint_path", str(source), "--output_path", str(target)]


@pytest.fixture
def commands(source: Path, convert) -> dict[str, list[str]]:
    moved = source.rename(source.with_name("mödel"))
    mca = convert(moved, "mca")
    return {
        "inspect": ["inspect", str(moved)],
        "plan": ["plan", "--checkpoint_path", str(moved)],
        "verify": ["verify", str(moved), str(mca)],
    }


@pytest.mark.parametrize("name", ["inspect", "plan", "verify"])
def test_standard_output_may_be_closed_full_or_ascii(name: str, commands, monkeypatch, capsys) -> None:
    command = commands[name]
    monkeypatch.setattr(sys, "stdout", None)
    assert main(command) == 0
    ascii_only = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(ascii_only, "ascii"))
    assert main(command) == 0
    assert b"m\\xf6del" in ascii_only.getvalue()
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    assert main(command) == 0
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        capsys.readouterr()
        assert main(command) == 1
        assert (
            capsys.readouterr().err == "error: standard output: cannot be written (No space left on device)\n"
        )


def test_long_values_are_whole_in_json(capsys) -> None:
    value = "é\x1b" * 3000
    output.write_json("inspect", {"value": value, "address": "https://me:secret@host/model"})
    assert json.loads(text := capsys.readouterr().out)["value"] == value
    assert text.isascii() and "secret" not in text and "\x1b" not in text


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert printable("a\x1b[31m\rb\ud800ä\nc") == "a\\x1b[31m\\rb\\ud800ä\nc"
    assert len(printable("x" * 5_000_000)) < 4000


@pytest.mark.parametrize(("text", "nbytes"), [
    ("2G", 2 * 10**9), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("1.5k", 1500), ("1Ki", 1024), ("7", 7),
])  # fmt: skip
def test_sizes_have_one_convention(text: str, nbytes: int) -> None:
    assert byte_count(text) == nbytes


@pytest.mark.parametrize(("flags", "message"), [
    (["--tensor_model_parallel_size=0"], "must be an integer of at least 1, not 0"),
    (["--virtual_pipeline_model_parallel_size=2"], "needs pipeline_model_parallel_size of at least 2"),
    (["--num_layers_in_first_pipeline_stage=1"], "num_layers_in_first_pipeline_stage"),
    (["--pipeline_model_parallel_size=2", "--pipeline_model_parallel_layout=E\x1b"], "cannot be read at"),
    (["--tensor_model_parallel_size=100000000000000000000"], "must be at most 65536"),
    (["--expert_tensor_parallel_size=100000000000000000000"], "must be at most 65536"),
    (["--pipeline_model_parallel_size=2", "--pipeline_model_parallel_layout=E(t*999999999)*999999999|L"],
     "more than 100000 layers and stages"),
    (["--workers=99999"], "expected at most 256 threads, not 99999"),
    (["--memory_limit=" + "9" * 400 + "G"], "expected a size such as"),
    (["--top\x1b[31m"], "unknown flag --top\\x1b"),
    (["--json"], "unknown flag --json; plan, inspect and verify take --json"),
])  # fmt: skip
def test_flags_that_no_model_could_have_exit_2(
    flags, message: str, source: Path, tmp_path: Path, capsys
) -> None:
    assert main([*arguments(source, tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_only_a_checkpoint_is_replaced_and_only_on_demand(
    source: Path, convert, tmp_path: Path, capsys
) -> None:
    mca = convert(source, "mca")
    for folder in (source, mca):
        (folder / "figure.png").write_text(folder.name)
    (mca / "tokenizer.json").touch()
    assert main(arguments(source, mca)) == 1
    assert main([*arguments(source, mca), "--overwrite", "--bf16"]) == 0
    assert not (mca / "tokenizer.json").exists() and (mca / "figure.png").read_text() == source.name
    assert '"bfloat16"' in (mca / "config.json").read_text()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").touch()
    capsys.readouterr()
    assert main([*arguments(source, precious), "--overwrite"]) == 1
    assert "has no checkpoint, so --overwrite does not replace it" in capsys.readouterr().err
    assert main([*arguments(source, source), "--overwrite"]) == 1
    assert "contains the source" in capsys.readouterr().err
    assert main([*arguments(source, tmp_path), "--overwrite"]) == 1
    assert (precious / "thesis.txt").exists() and (source / "config.json").exists()
    assert main(["plan", *arguments(source, mca), "--overwrite"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "mca", "precious"}


def test_a_directory_that_holds_more_than_a_checkpoint_is_kept(
    source: Path, convert, tmp_path: Path, capsys
) -> None:
    mca = convert(source, "mca")
    for more in (
        *("checkpoint-500/optimizer/o.pt", ".git/HEAD", "src/a.py", "train_log.jsonl", "thesis.txt"),
        *("iter_0000001/common.pt", "iter_0000001/pp_000/o.pt", "iter_0000002/__0_0.distcp", "optimizer.pt"),
    ):
        (mca / more).parent.mkdir(parents=True, exist_ok=True)
        (mca / more).touch()
        top, _, below = more.partition("/")
        named = more if top.startswith("iter_") or not below else f"{top}/"
        capsys.readouterr()
        for command in (["plan"], []):
            assert main([*command, *arguments(source, mca), "--overwrite"]) == 1
            reported = capsys.readouterr()
            assert f"{mca}: has {named}, which is not part of a checkpoint, so" in reported.out + reported.err
        assert main(arguments(source, mca)) == 1 and "--overwrite" not in capsys.readouterr().err
        assert (mca / more).exists()
        shutil.rmtree(mca / top) if top in ("checkpoint-500", ".git", "src", "iter_0000002") else (
            mca / more
        ).unlink()
    assert main([*arguments(source, mca), "--overwrite", "--to", "hf"]) == 0
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text('{"port": 80}')
    assert main([*arguments(source, project), "--overwrite"]) == 1
    assert "has no checkpoint, so --overwrite" in capsys.readouterr().err
    assert main([*arguments(source, source), "--overwrite", "--adapter_path", str(tmp_path / "adapter")]) == 1
    assert f"contains the source {source}; name" in capsys.readouterr().err, "the adapter's base model"
    assert main([*arguments(source, mca), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("umask", "small", "others"), [(0o077, 0o600, 0o600), (0o022, 0o640, 0o644), (0o002, 0o640, 0o664)]
)
def test_permissions_are_those_of_the_source_but_for_the_umask(
    umask: int, small: int, others: int, source: Path, convert
) -> None:
    """Small files keep theirs; of what is written anew the umask decides."""
    (source / "generation_config.json").chmod(0o440)
    before = os.umask(umask)
    try:
        mca = convert(source, "mca", tp=2)
        hf = convert(mca, "hf")
    finally:
        os.umask(before)
    for folder in (mca, hf):
        for path in (folder, *folder.rglob("*")):
            expected = 0o777 & ~umask if path.is_dir() else others
            if path.name == "generation_config.json":
                expected = small
            assert path.stat().st_mode & 0o777 == expected, path


def test_quiet_and_lines_of_progress(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    sizes = ["--tensor_model_parallel_size=2", "--expert_model_parallel_size=2"]
    assert main([*arguments(tiny("mixtral"), tmp_path / "loud"), *sizes]) == 0
    reported = capsys.readouterr().err
    assert (
        "converting: " in reported
        and "(100%)" in reported
        and reported.splitlines()[-1].startswith(str(tmp_path / "loud"))
    )
    assert "55 tensors" in reported and "sequence_parallel" not in reported
    assert main([*arguments(tiny("mixtral"), tmp_path / "quiet"), *sizes, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_names_its_kind_and_version(tiny, capsys) -> None:
    source, sizes = tiny("llama"), ["--tensor_model_parallel_size=2", "--pipeline_model_parallel_size=2"]
    assert main(["plan", "--json", "--checkpoint_path", str(source), *sizes]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["schema"], plan["version"]) == ("mca-convert/plan", 1)
    assert plan["layout_sizes"]["tensor_model_parallel_size"] == 2
    assert [(stage["layers"], stage["has_loss"]) for stage in plan["stages"]] == [
        ([0, 1], False),
        ([2, 3], True),
    ]
    assert main(["inspect", "--json", "--top=1", str(source)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"]) == ("mca-convert/inspect", 1)
    assert found["sizes"]["num_layers"] == 4 and found["biggest"][0][0] in (
        "lm_head.weight",
        "model.embed_tokens.weight",
    )


def test_verify_tells_programs_every_difference(tiny, tmp_path: Path, capsys) -> None:
    source, changed = tiny("llama"), tmp_path / "changed"
    shutil.copytree(source, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    assert main(["verify", "--json", str(source), str(source)]) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["schema"], same["version"], same["what"]) == ("mca-convert/verify", 1, "model")
    assert same["same"] and not same["problems"] and not same["differences"] and same["tensors"] > 30
    assert main(["verify", "--json", str(source), str(changed)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"] and list(found["differences"]) == ["model.norm.weight"]
    difference = found["differences"]["model.norm.weight"]
    assert (difference["elements"], difference["first"]["index"], difference["largest"]) == (1, [3], "inf")
    assert difference["first"]["values"][1] == "nan"


def test_what_cannot_be_written_is_foreseen(source: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "file").touch()
    assert main(["plan", *arguments(source, tmp_path / "file/out")]) == 1
    assert "is not a directory; name another path" in capsys.readouterr().out
    assert main(["plan", *arguments(source, tmp_path / ("n" * 238))]) == 0
    for name in ("n" * 239, "\u00e9" * 120, "n" * 300):
        capsys.readouterr()
        for command in (["plan"], []):
            assert main([*command, *arguments(source, tmp_path / name)]) == 1
            reported = capsys.readouterr()
            assert "bytes, more than 238; choose a shorter one" in reported.out + reported.err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["plan", *arguments(source, tmp_path / "out")]) == 1
    assert "cannot be written to; name another path" in capsys.readouterr().out
    monkeypatch.undo()
    volume = tmp_path / "volume"  # written inside, so that the directory above it does not matter
    volume.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) == volume)
    assert main(["plan", *arguments(source, volume)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != volume)
    assert main(["plan", *arguments(source, volume)]) == 1
    assert f"{volume} cannot be written to; name another path" in capsys.readouterr().out
    monkeypatch.undo()
    mca = volume / "mca"
    assert main(arguments(source, mca)) == 0
    monkeypatch.setattr(atomic, "_is_mount", lambda path: path == mca)
    for command in (["plan"], []):
        assert main([*command, *arguments(source, mca), "--overwrite"]) == 1
        reported = capsys.readouterr()
        assert (
            f"--output_path {mca}: is a mount point, which cannot be replaced" in reported.out + reported.err
        )
    monkeypatch.undo()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for command in (["plan"], []):
        assert main([*command, *arguments(source, tmp_path / "out")]) == 1
        reported = capsys.readouterr()
        assert "files must be open at once, the system allows 12" in reported.out + reported.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "sequence"),
    [
        ({"pipeline_model_parallel_size": 2}, None),
        ({"tensor_model_parallel_size": 1}, None),
        ({"tensor_model_parallel_size": 2}, True),
        ({"tensor_model_parallel_size": 4}, True),
    ],
)
def test_sequence_parallelism_that_experts_need_is_no_news_of_a_conversion(
    sizes: dict[str, int], sequence: bool | None
) -> None:
    layout = _layout(Parser("mca-convert"), Namespace(**sizes))
    assert layout is not None
    assert layout.sequence_parallel is sequence


_CONVERSION = {
    "checkpoint_path": None,
    "output_path": "o",
    "to": None,
    "adapter_path": None,
    "merge": False,
    "dtype": None,
    "fp8": False,
    "max_shard_size": 5_000_000_000,
    "overwrite": False,
    "workers": None,
    "memory_limit": None,
}


@pytest.mark.parametrize(
    ("command", "words", "defaults"),
    [
        ("convert", ["--output_path", "o"], _CONVERSION | {"push_to_hub": None, "quiet": False}),
        ("plan", ["--output_path", "o"], _CONVERSION | {"json": False, "values": False}),
        ("plan", [], _CONVERSION | {"output_path": None, "json": False, "values": False}),
        ("inspect", ["p"], {"path": "p", "json": False, "values": False, "top": 5}),
        (
            "verify",
            ["a", "b"],
            {"first": "a", "second": "b", "tolerance": None, "json": False, "quiet": False}
            | {"workers": None, "memory_limit": None},
        ),
    ],
)
def test_defaults_of_all_flags(command: str, words: list[str], defaults: dict[str, object]) -> None:
    assert vars(program().parser(command).read(words)) == defaults
