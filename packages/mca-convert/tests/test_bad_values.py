"""Values that pass as they are, and those that no weights or no narrower type can have."""

import json
import shutil
from pathlib import Path

import pytest
from files import read_raw, refused, write_raw

from mca_convert.cli import main

BROKEN = "model.layers.1.mlp.up_proj.weight"


def test_a_copy_keeps_not_a_number_bit_for_bit_and_warns_once(source: Path, convert, capsys, caplog) -> None:
    """Nothing is assumed of the values: NaNs keep their payload."""
    file = source / "model.safetensors"
    header, data = read_raw(file)
    start, stop = header[BROKEN]["data_offsets"]
    odd = b"\x01\x00\xc0\x7f\x00\x00\x80\xff\x01\x00\x00\x80\x01\x00\xa0\xff"
    data = data[:start] + odd * ((stop - start) // len(odd)) + data[stop:]
    write_raw(file, header, data)
    mca = convert(source, "mca", tp=2, pp=2)
    copies = mca, convert(mca, "tp4", "--to", "mca", tp=4), convert(mca, "hf")
    values = f"{(stop - start) // len(odd) * 3:,} values"
    reported = f"1 tensor has values that are not finite (infinite or NaN): {BROKEN} ({values})"
    for line, read in zip(caplog.messages, (source, mca, mca), strict=True):
        assert line.startswith(f"{read}: {reported}; they are copied as they are; ")
    back = copies[-1]
    again = read_raw(back / "model.safetensors")
    place = again[0][BROKEN]["data_offsets"]
    assert again[1][slice(*place)] == data[start:stop]
    for copy in copies:
        capsys.readouterr()
        assert main(["verify", str(source), str(copy)]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [f"warning: in both, {reported}"]
        assert main(["inspect", str(copy), "--values"]) == 1
        assert f"not finite    {BROKEN}, {values}" in capsys.readouterr().out
    assert main(["plan", "--checkpoint_path", str(source), "--values"]) == 0
    assert f"note: {source}: {reported}" in capsys.readouterr().out
    assert main(["inspect", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] is None


def test_reading_all_values_finds_a_damaged_file(source: Path, convert, capsys) -> None:
    mca = convert(source, "mca")
    (weights,) = mca.rglob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1  # the lowest bit of a finite number
    weights.write_bytes(data)
    capsys.readouterr()
    for words in (["inspect", str(mca)], ["plan", "--checkpoint_path", str(mca)]):
        assert main(words) == 0
        assert main([*words, "--values"]) == 1
        reported = capsys.readouterr()
        assert f"{weights}: its checksum is" in reported.out + reported.err


def test_values_that_are_all_finite_are_reported_as_such(source: Path, capsys) -> None:
    assert main(["inspect", str(source), "--values"]) == 0
    assert "values        all are finite" in capsys.readouterr().out
    assert main(["plan", "--checkpoint_path", str(source), "--fp16"]) == 0
    assert "note: no value was read" in capsys.readouterr().out
    assert main(["plan", "--checkpoint_path", str(source), "--fp16", "--values"]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "flags", "work"),
    [
        ("float32", ["--fp16"], "cast; remove --fp16 to copy it as it is"),
        ("float32", ["--bf16"], "cast; remove --bf16 to copy it as it is"),
        ("bfloat16", ["--fp32"], "cast; remove --fp32 to copy it as it is"),
        ("float16", ["--to", "hf", "--fp8"], "written as fp8; remove --fp8"),
        ("float64", ["--bf16", "--tensor_model_parallel_size=2"], "cast; remove --bf16 to copy it as it is"),
    ],
)
def test_what_computes_values_refuses_those_that_are_not_finite(
    dtype: str, flags: list[str], work: str, source: Path, tmp_path: Path, capsys
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.to(getattr(torch, dtype))
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors[BROKEN][2:4, 3] = torch.tensor([torch.nan, -torch.inf])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    values = "2 values that are not finite (infinite or NaN)"
    reported = f"{source}/model.safetensors: {BROKEN} has {values} and cannot be {work}"
    assert reported in refused(source, tmp_path, capsys, *flags)
    assert main(["plan", "--checkpoint_path", str(source), *flags]) == 0
    assert "--values reads them" in capsys.readouterr().out
    assert main(["plan", "--checkpoint_path", str(source), *flags, "--values"]) == 1
    assert reported in capsys.readouterr().out


def test_a_cast_to_the_own_dtype_is_a_copy(source: Path, convert, caplog) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors[BROKEN][2, 3] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    convert(source, "mca", "--fp32")
    assert f"{BROKEN} (1 value); they are copied as they are" in caplog.text


@pytest.mark.parametrize("stored", ["weight", "scale"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_that_is_not_finite_is_not_dequantised(
    dtype: str, stored: str, source: Path, convert, tmp_path: Path, capsys
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    fp8 = convert(source, "fp8", "--to", "hf", "--fp8")
    tensors = load_file(fp8 / "model.safetensors")
    if stored == "weight":
        tensors[BROKEN] = tensors[BROKEN].float().to(getattr(torch, dtype))
        tensors[BROKEN].view(torch.uint8)[2, 3] = 0x7F
        values = "1 value"
    else:
        tensors[f"{BROKEN}_scale_inv"][0, 0] = torch.nan
        values = f"{tensors[BROKEN].numel():,} values"
    save_file(tensors, fp8 / "model.safetensors", {"format": "pt"})
    error = refused(fp8, tmp_path, capsys)
    assert f"{BROKEN} has {values} that are not finite (infinite or NaN) and cannot be dequantised" in error


def test_stacked_experts_are_named_with_their_number(tiny, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny("gpt_oss"), tmp_path / "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name][1, 2, 3:6] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"{name}[1] has 3 values" in refused(folder, tmp_path, capsys, "--bf16")


@pytest.mark.parametrize("dtype", ["int64", "bool", "float8_e4m3fn"])
def test_weights_that_are_no_floats(dtype: str, source: Path, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(getattr(torch, dtype))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight has dtype" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize(("dtype", "flag", "value", "message"), [
    ("float32", "--bf16", 3.4e38, "1 value, the largest 3.4e+38, that overflows bf16"),
    ("float64", "--fp32", 1e39, "1 value, the largest 1e+39, that overflows fp32"),
    ("float64", "--bf16", 1e39, "1 value, the largest 1e+39, that overflows bf16"),
])  # fmt: skip
def test_other_casts_overflow_too(
    dtype: str, flag: str, value: float, message: str, source: Path, tmp_path: Path, capsys
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.layers.3.mlp.down_proj.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert main(["--checkpoint_path", str(source), "--output_path", str(tmp_path / "mca"), flag]) == 0
    assert main(["--checkpoint_path", str(tmp_path / "mca"), "--output_path", str(tmp_path / "hf")]) == 0
    back = load_file(tmp_path / "hf/model.safetensors")
    code = {"--bf16": torch.bfloat16, "--fp32": torch.float32}[flag]
    assert {tensor.dtype for tensor in back.values()} == {code}
    assert torch.equal(back[name], tensors[name].to(code))
    tensors[name][1, 2] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    error = refused(source, tmp_path, capsys, flag)
    assert f"{source}/model.safetensors: {name} has {message}" in error


def test_fp16_overflow_names_the_tensor(source: Path, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    tensors[name][2, 3:5] = torch.tensor([70000.0, -80000.0])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    reported = f"{source}/model.safetensors: {name} has 2 values, the largest 80000, that overflow fp16, whose largest"
    assert reported in refused(source, tmp_path, capsys, "--fp16")
    assert main(["plan", "--checkpoint_path", str(source), "--fp16", "--values"]) == 1
    assert reported in capsys.readouterr().out
