"""Values that pass as they are, and those that no weights or no narrower type can have."""

from pathlib import Path

import pytest
from files import read_raw, refused, write_raw

from mca_convert.cli import main


def test_not_a_number_passes_bit_for_bit(source: Path, convert) -> None:
    """Nothing is assumed of the values: NaNs keep their payload."""
    file = source / "model.safetensors"
    header, data = read_raw(file)
    start, stop = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"]
    odd = b"\x01\x00\xc0\x7f\x00\x00\x80\xff\x01\x00\x00\x80\x01\x00\xa0\xff"
    data = data[:start] + odd * ((stop - start) // len(odd)) + data[stop:]
    write_raw(file, header, data)
    back = convert(convert(source, "mca", tp=2, pp=2), "hf")
    again = read_raw(back / "model.safetensors")
    place = again[0]["model.layers.1.mlp.up_proj.weight"]["data_offsets"]
    assert again[1][slice(*place)] == data[start:stop]
    assert main(["verify", str(source), str(back)]) == 0


@pytest.mark.parametrize("dtype", ["int64", "bool", "float8_e4m3fn"])
def test_weights_that_are_no_floats(dtype: str, source: Path, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(getattr(torch, dtype))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight has dtype" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize(("dtype", "flag", "value", "message"), [
    ("float32", "--bf16", 3.4e38, "3.4e+38 overflows bf16"),
    ("float64", "--fp32", 1e39, "1e+39 overflows fp32"),
    ("float64", "--bf16", 1e39, "1e+39 overflows bf16"),
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
    assert message in error and "decoder.layers.3.mlp.linear_fc2.weight" in error


def test_fp16_overflow_names_the_tensor(source: Path, tmp_path: Path, capsys) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][2, 3] = 70000.0
    tensors["model.norm.weight"][0] = torch.inf  # infinite already: stays so
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    error = refused(source, tmp_path, capsys, "--fp16")
    assert "70000 overflows fp16" in error and "decoder.layers.3.mlp.linear_fc1.weight" in error
