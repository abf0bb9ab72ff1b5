"""Every bad input gives one clear line, the right exit code, and nothing at the output path."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from files import damage_header, edit_fields, read_raw, refused, truncate, write_raw

from mca_convert.cli import main


@pytest.fixture
def sharded(tiny, tmp_path: Path) -> Path:
    assert main(["--checkpoint_path", str(tiny("llama")), "--output_path", str(tmp_path / "mca")]) == 0
    target = tmp_path / "sharded"
    flags = ["--max_shard_size", "20K"]
    assert main(["--checkpoint_path", str(tmp_path / "mca"), "--output_path", str(target), *flags]) == 0
    return target


def test_missing_directory(tmp_path: Path, capsys) -> None:
    assert "absent: no such directory" in refused(tmp_path / "absent", tmp_path, capsys)


def test_a_file_is_no_directory(source: Path, tmp_path: Path, capsys) -> None:
    error = refused(source / "model.safetensors", tmp_path, capsys)
    assert f"is a file; name the checkpoint's directory, {source}" in error


def test_a_name_of_the_hub_is_told_how_to_download_without_its_client(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    error = refused(Path("no-such-owner/model"), tmp_path, capsys)
    assert "hf download no-such-owner/model --local-dir" in error


def test_one_iteration_of_a_checkpoint(tiny, convert, tmp_path: Path, capsys) -> None:
    mca = convert(tiny("llama"), "mca")
    assert f"name the checkpoint itself, {mca}" in refused(mca / "iter_0000001", tmp_path, capsys)


def test_git_lfs_pointer(source: Path, tmp_path: Path, capsys) -> None:
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "a git-lfs pointer, not the weights" in refused(source, tmp_path, capsys)


def test_all_damaged_shards_are_told_at_once(sharded: Path, tmp_path: Path, capsys) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    for file in files[:2]:
        truncate(file)
    capsys.readouterr()
    assert main(["--checkpoint_path", str(sharded), "--output_path", str(tmp_path / "o")]) == 1
    error = capsys.readouterr().err
    assert "2 problems" in error and all(file.name in error for file in files[:2])


def test_no_config(source: Path, tmp_path: Path, capsys) -> None:
    (source / "config.json").unlink()
    assert "config.json: no such file" in refused(source, tmp_path, capsys)


def test_no_weights(source: Path, convert, tmp_path: Path, capsys) -> None:
    mca = convert(source, "mca")
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    assert "model.safetensors.index.json is missing" in refused(source, tmp_path, capsys)
    (source / "model-00001-of-00002.safetensors").unlink()
    assert "holds no weights" in refused(source, tmp_path, capsys)
    (source / "model.gguf").touch()
    assert "model.gguf, a format that is not read" in refused(source, tmp_path, capsys)
    (source / "config.json").unlink()
    assert "model.gguf, a format that is not read" in refused(source, tmp_path, capsys)
    (mca / "mca_config.json").unlink()
    assert "mca_config.json is missing; put it back there\n" in refused(mca, tmp_path, capsys)
    (mca / "latest_checkpointed_iteration.txt").unlink()
    (mca / "iter_0000001" / ".metadata").touch()
    assert "put it back there, or name its iter_0000001\n" in refused(mca, tmp_path, capsys)


def test_a_pickle_that_is_none_and_one_of_another_name_are_told(source: Path, tmp_path: Path, capsys) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "pytorch_model.bin: not a file of torch.save" in refused(source, tmp_path, capsys)
    (source / "pytorch_model.bin").rename(source / "weights.bin")
    assert "holds weights.bin, but neither model.safetensors nor pytorch_model.bin" in refused(
        source, tmp_path, capsys
    )


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "no_such_model"}, "model_type 'no_such_model' is not supported; supported: "),
    ({"model_type": "qwen33"}, "model_type 'qwen33' is not supported; did you mean 'qwen3'? Supported: afmoe, "),
    ({"model_type": "jamba", "mamba_expand": "2"}, "'mamba_expand' is '2'; expected a number"),
    (
        {"model_type": "mamba2", "expand": 3, "num_heads": 8, "head_dim": 16, "hidden_size": 64},
        "'expand' is 3; expected num_heads x head_dim / hidden_size, 2",
    ),
    ({"model_type": "rwkv"}, "model_type 'rwkv' is not supported: state space or recurrent layers"),
    ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
    ({"num_hidden_layers": 5}, "9 missing tensors (model.layers.4."),
    ({"num_hidden_layers": 3}, "9 unexpected tensors (model.layers.3."),
    ({"vocab_size": 80}, "expected [80, 32]"),
    ({"intermediate_size": 96}, "expected [96, 32]"),
    ({"num_key_value_heads": 4}, "expected [64, 32]"),
    ({"hidden_size": 32.0}, "hidden_size must be a whole number, not 32.0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, not 1000000000"),
    ({"num_key_value_heads": 0, "head_dim": -1}, "; head_dim must be at least 1, not -1"),
    ({"initializer_range": -1}, "initializer_range must be at least 0"),
    ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false, not 'false'"),
    ({"model_type": ["llama"]}, "config.json has no 'model_type'"),
    ({"rope_parameters": "yarn"}, "must be an object, not 'yarn'"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "'rope_theta' must be a number, not '1e4'"),
    ({"quantization_config": "fp8"}, "'quantization_config' must be an object, not 'fp8'"),
    ({"model_type": "exaone4", "layer_types": 3}, "a exaone4 model cannot be made of its values"),
])  # fmt: skip
def test_config_that_does_not_fit(source: Path, tmp_path: Path, capsys, change, message: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    assert message in refused(source, tmp_path, capsys)


def test_config_that_is_not_json(source: Path, tmp_path: Path, capsys) -> None:
    (source / "config.json").write_text('{"model_type": ')
    assert "config.json: cannot be read" in refused(source, tmp_path, capsys)


def overlap(header: dict) -> None:
    start = header["model.norm.weight"]["data_offsets"][0]
    header["lm_head.weight"]["data_offsets"] = [start, start + 70 * 32 * 4]


def twice(header: dict) -> bytes:
    text = json.dumps(header)
    entry = json.dumps(header["model.norm.weight"])
    return f'{{"model.norm.weight": {entry}, {text[1:]}'.encode()


NORM = "model.norm.weight"
DAMAGES = {
    "truncated": (truncate, "it is truncated, copy or download it again"),
    "empty": (lambda file: file.write_bytes(b""), "too few for a safetensors file; it is truncated, copy"),
    "huge header": (
        lambda file: file.write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        "(copy or download it again",
    ),
    "big header": (lambda file: file.write_bytes(struct.pack("<Q", 99_000_000) + b"{}"), "header claims"),
    "no json": (damage_header(lambda header: b"{" * 5000), "damaged, copy or download it again"),
    "list": (damage_header(lambda header: b"[1]"), "not a JSON object"),
    "no utf-8": (damage_header(lambda header: b'{"\xff": 1}'), "not valid JSON"),
    "trailing": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes after its last tensor"),
    "overlap": (damage_header(overlap), "overlaps the tensor before it"),
    "twice": (damage_header(twice), "names 'model.norm.weight' twice"),
    "missing": (
        damage_header(lambda header: {k: v for k, v in header.items() if k != NORM}),
        "leaves a hole",
    ),
    "dtype": (damage_header(lambda header: header[NORM].update(dtype="F31")), "unknown dtype 'F31'"),
    "negative": (damage_header(lambda header: header[NORM].update(shape=[-32])), "not a list of sizes"),
    "float": (damage_header(lambda header: header[NORM].update(shape=[32.0])), "not a list of sizes"),
    "shape": (damage_header(lambda header: header[NORM].update(shape=[31])), "takes 124 bytes"),
    "overflow": (damage_header(lambda header: header[NORM].update(shape=[1 << 62, 1 << 62])), "takes "),
    "offsets": (damage_header(lambda header: header[NORM].update(data_offsets=[5])), "not two positions"),
    "extra key": (damage_header(lambda header: header[NORM].update(x=1)), "must hold exactly"),
    "other name": (
        damage_header(lambda header: header.update(z=header.pop(NORM))),
        "1 missing tensor (model.norm",
    ),
    "metadata": (
        damage_header(lambda header: header.update(__metadata__={"a": 1})),
        "must map names to strings",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_safetensors(damage: str, source: Path, tmp_path: Path, capsys) -> None:
    apply, message = DAMAGES[damage]
    apply(source / "model.safetensors")
    error = refused(source, tmp_path, capsys)
    assert (message in error and "model.safetensors" in error) or "source" in error


def test_bit_flips_in_the_header_are_refused_or_harmless(source: Path, tmp_path: Path, capsys) -> None:
    import random

    file = source / "model.safetensors"
    raw, generator = file.read_bytes(), random.Random(0)
    (length,) = struct.unpack("<Q", raw[:8])
    for number in range(150):
        damaged = bytearray(raw)
        damaged[generator.randrange(8 + length)] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        output = tmp_path / f"flip{number}"
        code = main(["--checkpoint_path", str(source), "--output_path", str(output)])
        # a flip can swap one valid offset or white space for another; never a half-written directory
        assert code == 0 or not output.exists()
        assert code in (0, 1)
        if code == 0:
            header, _ = read_raw(file)
            assert header.keys() - {"__metadata__"} == read_raw_names(raw)
    capsys.readouterr()


def read_raw_names(raw: bytes) -> set[str]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]).keys() - {"__metadata__"}


def test_weights_that_are_no_file_are_not_waited_for(source: Path, tmp_path: Path, capsys) -> None:
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    assert "not a file but a directory, pipe" in refused(source, tmp_path, capsys)


def test_what_the_system_refuses_is_one_line(source: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    assert "choose a shorter one" in refused_at(source, tmp_path / ("n" * 300), capsys)
    if os.geteuid() != 0:
        (source / "generation_config.json").chmod(0)
        assert "generation_config.json: cannot be read (Permission denied)" in refused(
            source, tmp_path, capsys
        )
        (source / "generation_config.json").chmod(0o600)
    monkeypatch.setattr("mca_convert.engine.run_all", lambda *_: [0] * (1 << 60))
    assert "out of memory" in refused(source, tmp_path, capsys)


def refused_at(source: Path, output: Path, capsys) -> str:
    assert main(["--checkpoint_path", str(source), "--output_path", str(output)]) == 1
    return capsys.readouterr().err


def test_missing_shard(sharded: Path, tmp_path: Path, capsys) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    error = refused(sharded, tmp_path, capsys)
    assert f"({victim.name})" in error and "files named in model.safetensors.index.json are missing" in error


def test_shards_missing_with_a_self_consistent_index(sharded: Path, tmp_path: Path, capsys) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != victim.name}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing tensor" in refused(sharded, tmp_path, capsys)


def test_tensor_in_two_shards(sharded: Path, tmp_path: Path, capsys) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    header, data = read_raw(files[0])
    more, more_data = read_raw(files[1])
    name = next(name for name in header if name != "__metadata__")
    start, stop = header[name]["data_offsets"]
    entry = {**header[name], "data_offsets": [len(more_data), len(more_data) + stop - start]}
    write_raw(files[1], {**more, name: entry}, more_data + data[start:stop])
    error = refused(sharded, tmp_path, capsys)
    assert f"tensor {name} is in {files[0].name} and in {files[1].name}" in error


def test_index_that_leads_out_of_the_directory(sharded: Path, tmp_path: Path, capsys) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(iter(index["weight_map"]))
    wrongs = {"../elsewhere.safetensors": "leads out of the directory", "a\0b": "cannot be a file of it"}
    for wrong, message in wrongs.items():
        index["weight_map"][name] = wrong
        file.write_text(json.dumps(index))
        error = refused(sharded, tmp_path, capsys)
        assert f"{file}: " in error and message in error


@pytest.mark.parametrize(("flags", "message"), [
    (["--tensor_model_parallel_size", "3"], "cannot be divided by tensor_model_parallel_size 3; change"),
    (["--pipeline_model_parallel_size", "3"], "pipeline_model_parallel_size"),
    (["--pipeline_model_parallel_size", "2", "--pipeline_model_parallel_layout", "Ett|tL"], "has 3 decoder layers"),
])  # fmt: skip
def test_layout_that_does_not_divide(
    flags: list[str], message: str, source: Path, tmp_path: Path, capsys
) -> None:
    assert message in refused(source, tmp_path, capsys, *flags)


def test_experts_that_do_not_divide(tiny, tmp_path: Path, capsys) -> None:
    error = refused(tiny("mixtral"), tmp_path, capsys, "--expert_model_parallel_size", "3")
    assert "num_moe_experts 4 cannot be divided by expert_model_parallel_size 3; change" in error


def test_output_that_is_taken(source: Path, tmp_path: Path, capsys) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("x")
    assert main(["--checkpoint_path", str(source), "--output_path", str(taken)]) == 1
    reported = capsys.readouterr().err
    assert "exists and is not empty" in reported and "--overwrite" not in reported
    (taken / "precious").rename(taken / "README.md")
    (taken / "config.json").write_text('{"model_type": "llama"}')
    assert main(["--checkpoint_path", str(source), "--output_path", str(taken)]) == 1
    assert "--overwrite replaces the checkpoint there" in capsys.readouterr().err
    assert (taken / "README.md").read_text() == "x"
    assert main(["--checkpoint_path", str(source), "--output_path", str(source / "inside")]) == 1
    assert "is inside the source" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--checkpoint_path", "a"], "missing --output_path; see mca-convert --help"),
    (["--output_path", "b"], "missing --checkpoint_path"),
    (["--checkpoint_path", "a", "--output_path", "b", "--tensor_model_paralel_size", "2"],
     "did you mean --tensor_model_parallel_size?"),
    (["--checkpoint_path", "a", "--output_path", "b", "--tp", "2"], "did you mean --tensor_model_parallel_size?"),
    (["--checkpoint_path", "a", "--output_path", "b", "--dtype", "bf16"], "did you mean --bf16, --fp16 or --fp32?"),
    (["--checkpoint_path", "a", "--output_path", "b", "--vpp-size=2"],
     "did you mean --virtual_pipeline_model_parallel_size?"),
    (["--checkpoint_path", "a", "--output_path", "b", "--recompute_granularity", "full"], "so set it for training"),
    (["--checkpoint_path", "a", "--output_path", "b", "--bf16", "--fp16"], "--fp16 excludes --bf16"),
    (["--checkpoint_path", "a", "--output_path", "b", "--workers", "0"], "at least 1"),
    (["--checkpoint_path", "a", "--output_path", "b", "--memory_limit", "lots"], "expected a size such as"),
    (["--checkpoint_path", "a", "--output_path", "b", "--memory_limit=1KB"],
     "--memory_limit is 1,000 bytes; expected at least 192KiB for 1 thread; raise it\n"),
    (["verify", "a", "b", "--memory_limit=575KiB", "--workers=3"],
     "--memory_limit is 588,800 bytes; expected at least 576KiB for 3 threads; raise it or lower --workers\n"),
    (["--checkpoint_path", "a", "--output_path", "b", "--tensor_model_parallel_size=-2"],
     "error: --tensor_model_parallel_size must be an integer of at least 1, not -2; see"),
    (["verify", "a"], "missing B; see mca-convert verify --help"),
    (["verfy", "a", "b"], "unknown command 'verfy'; did you mean 'verify'?"),
    (["Qwen3-8B", "qwen3-mca"], "a checkpoint is named by --checkpoint_path"),
    (["verify", "a", "b", "--tolerance", "-1"], "at least 0"),
])  # fmt: skip
def test_wrong_usage_exits_2(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and message in error


def test_nothing_that_is_printed_has_the_secrets_of_an_address(source: Path, tmp_path: Path, capsys) -> None:
    address, model = "https://me:SECRET@host/model?sig=SECRET", ["--checkpoint_path", str(source)]
    for words in (
        ["--checkpoint_path", address, "--output_path", str(tmp_path / "out")],
        [*model, "--output_path", str(source / "config.json" / address)],
        [*model, "--output_path", str(tmp_path / "out"), "--adapter_path", address],
        [*model, "--output_path", str(tmp_path / "out"), "--push_to_hub", address],
        ["plan", "--checkpoint_path", address],
        ["inspect", address],
        ["verify", address, str(source)],
        [address],
    ):
        assert main(words) != 0, words
        printed = "".join(capsys.readouterr())
        assert "https:/" in printed and "SECRET" not in printed, words


def test_layout_flags_make_no_sense_for_an_export(source: Path, tmp_path: Path, capsys) -> None:
    mca = tmp_path / "mca"
    assert main(["--checkpoint_path", str(source), "--output_path", str(mca)]) == 0
    arguments = ["--checkpoint_path", str(mca), "--output_path", str(tmp_path / "x")]
    assert main([*arguments, "--tensor_model_parallel_size", "2"]) == 2
    assert "add --to mca" in capsys.readouterr().err


def flip_byte(file: Path, position: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= 4
    file.write_bytes(raw)


def edited(file: str, **changes: object) -> Callable[[Path], object]:
    """Changes keys of a JSON file of a checkpoint, those of the model in ``mca_config.json``."""

    def edit(mca: Path) -> object:
        document = json.loads((mca / file).read_text())
        edit_fields(document.get("model", document), changes)
        return (mca / file).write_text(json.dumps(document))

    return edit


def test_damaged_mca_checkpoints(source: Path, tmp_path: Path, capsys) -> None:
    pristine = tmp_path / "pristine"
    flags = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2"]
    assert main(["--checkpoint_path", str(source), "--output_path", str(pristine), *flags]) == 0
    file = "iter_0000001/pp_001/tp_00.safetensors"
    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "flipped": (lambda mca: flip_byte(mca / file, -9), "damaged, copy or download it again"),
        "truncated": (lambda mca: truncate(mca / file), "it is truncated"),
        "missing": (lambda mca: (mca / file).unlink(), "no such file"),
        "swapped": (
            lambda mca: (mca / "iter_0000001/pp_000/tp_00.safetensors").replace(mca / file),
            "no such file",
        ),
        "no manifest": (lambda mca: (mca / "iter_0000001/manifest.json").unlink(), "incomplete"),
        "bad manifest": (lambda mca: (mca / "iter_0000001/manifest.json").write_text("{}"), "manifest"),
        "no latest": (lambda mca: (mca / "latest_checkpointed_iteration.txt").unlink(), "incomplete"),
        "latest": (lambda mca: (mca / "latest_checkpointed_iteration.txt").write_text("7\n"), "iter_0000007"),
        "config": (lambda mca: (mca / "mca_config.json").write_text("{}"), "mca_config.json"),
        "no files": (
            edited("iter_0000001/manifest.json", files={}),
            "manifest of version 1; the file is dam",
        ),
        "text": (edited("mca_config.json", text_model_type="x"), "mca_config.json: text_model_type is 'x'"),
        "vision": (
            edited("mca_config.json", vision={"vision_fields": {}}),
            "mca_config.json: vision is set, unlike in",
        ),
        "layer_type_overrides": (
            edited("mca_config.json", layer_type_overrides={"a": 1}),
            "layer_type_overrides a must be an object, not 1",
        ),
        "key": (
            edited("mca_config.json", layer_type_overrides={"a": {"b": 1}}),
            "layer_type_overrides a: unknown key b",
        ),
        **{
            f"extra {key}": (
                edited("mca_config.json", extra={key: value}),
                f"mca_config.json: extra: {key} must be",
            )
            for key, value in (
                ("hf_duplicates", 5),
                ("hf_duplicates", [["a"]]),
                ("hf_carried", ["a"]),
                ("hf_carried", {"a": "b"}),
                ("hf_vision_more", {"a": [-1]}),
                ("hf_spelling", 1),
            )
        },
        "width": (edited("mca_config.json", value_channels=10**30), "value_channels must be at most 4194304"),
    }
    for name, (damage, message) in damages.items():
        mca = tmp_path / name
        shutil.copytree(pristine, mca)
        damage(mca)
        error = refused(mca, tmp_path, capsys)
        assert message in error, name
        assert main(["inspect", str(mca)]) == (name != "flipped"), name


def test_no_torch_on_any_path(tiny, tmp_path: Path) -> None:
    code = f"""
import sys
from mca_convert.cli import main
assert main(["--checkpoint_path", {str(tiny("qwen3", "bfloat16"))!r}, "--output_path", {str(tmp_path / "a")!r}]) == 0
assert main(["--checkpoint_path", {str(tmp_path / "a")!r}, "--output_path", {str(tmp_path / "b")!r}, "--fp16"]) == 0
assert main(["verify", {str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}, "--tolerance", "0.01"]) == 0
bad = [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "megatron", "triton")]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_quick_and_imports_no_numpy() -> None:
    code = "import sys; from mca_convert.cli import main; assert main(['--help']) == main(['plan', '--help']) == 0; "
    code += "assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
