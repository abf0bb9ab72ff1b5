"""--bf16, --fp16 and --fp32 change weights and configuration together."""

import json
from pathlib import Path

import pytest
import torch
from files import bits, hf_tensors

from mca_config.errors import McaError
from mca_convert.cli import main

DTYPES = {"--bf16": torch.bfloat16, "--fp16": torch.float16, "--fp32": torch.float32}


@pytest.mark.parametrize("flag", sorted(DTYPES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casts_equal_torch(flag: str, dtype: str, tiny, convert) -> None:
    source = tiny("qwen3", dtype)
    expected = {name: tensor.to(DTYPES[flag]) for name, tensor in hf_tensors(source).items()}
    on_import = convert(convert(source, "mca1", flag, tp=2, pp=2), "hf1")
    on_export = convert(convert(source, "mca2", tp=2), "hf2", flag)
    for target in (on_import, on_export):
        actual = hf_tensors(target)
        assert all(torch.equal(bits(actual[name]), bits(tensor)) for name, tensor in expected.items())
        config = json.loads((target / "config.json").read_text())
        assert config["dtype"] == str(DTYPES[flag]).removeprefix("torch.")
        assert "torch_dtype" not in config


def test_fp64_is_rounded_once() -> None:
    import ml_dtypes
    import numpy as np

    from mca_models.storage.values import cast_into

    tie = 1 + 2.0**-8  # halfway between two bf16 numbers, the lower one even
    cases = {
        tie: 1.0,
        tie + 2.0**-30: 1 + 2.0**-7,
        tie - 2.0**-30: 1.0,
        1 + 3 * 2.0**-8 - 2.0**-30: 1 + 2.0**-7,
        1e-50: 0.0,
        3.3895e38: 3.3895313892515355e38,
    }
    source = np.array([sign * value for value in cases for sign in (1, -1)] + [np.inf, np.nan])
    target = np.empty(source.shape, ml_dtypes.bfloat16)
    cast_into(source, target, "x")
    right = [sign * value for value in cases.values() for sign in (1, -1)] + [np.inf, np.nan]
    np.testing.assert_array_equal(target.astype(np.float64), right)
    with pytest.raises(McaError, match="1e\\+300 overflows bf16"):
        cast_into(np.array([1e300]), np.empty(1, ml_dtypes.bfloat16), "x")


def test_torch_dtype_of_older_configs_follows(tiny, convert, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(tiny("llama"), source)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    back = convert(convert(source, "mca", "--bf16"), "hf")
    written = json.loads((back / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and "dtype" not in written


def test_router_biases_stay_fp32(tiny, convert) -> None:
    back = convert(convert(tiny("glm4_moe"), "mca", "--bf16", ep=2), "hf")
    for name, tensor in hf_tensors(back).items():
        assert tensor.dtype == (torch.float32 if "e_score_correction_bias" in name else torch.bfloat16), name


@pytest.mark.parametrize(
    ("case", "kept"),
    [("ernie4_5_moe", ("gate.weight", "correction_bias")), ("flint", ("gate.weight", "softmax_offset"))],
)
def test_what_transformers_keeps_in_fp32_stays(case: str, kept: tuple[str, ...], tiny, convert) -> None:
    back = hf_tensors(convert(convert(tiny(case), "mca", "--bf16", ep=2), "hf"))
    low = {name for name, tensor in back.items() if tensor.dtype == torch.bfloat16}
    assert back.keys() - low == {name for name in back if name.endswith(kept)} and low


def test_router_biases_become_fp32_like_all_else(tiny, convert, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    low = {name: tensor.bfloat16() for name, tensor in hf_tensors(tiny("glm4_moe")).items()}
    (tmp_path / "low").mkdir()
    save_file(low, tmp_path / "low/model.safetensors", {"format": "pt"})
    (tmp_path / "low/config.json").write_bytes((tiny("glm4_moe") / "config.json").read_bytes())
    back = hf_tensors(convert(convert(tmp_path / "low", "mca", "--fp32", ep=2), "hf"))
    assert back.keys() == low.keys()
    assert all(torch.equal(tensor, low[name].float()) for name, tensor in back.items())


def test_verify_with_a_tolerance(tiny, convert, capsys) -> None:
    source = tiny("qwen3")
    cast = convert(source, "mca", "--bf16", tp=2)
    assert main(["verify", str(source), str(cast)]) == 1
    assert "(--tolerance allows this)" in capsys.readouterr().out
    assert main(["verify", str(source), str(cast), "--tolerance", "0.02"]) == 0
    assert main(["verify", str(source), str(cast), "--tolerance", "1e-7"]) == 1
    assert "elements differ, the first at [" in capsys.readouterr().out


def test_verify_tells_where_models_differ(tiny, convert, tmp_path: Path, capsys) -> None:
    from safetensors.torch import save_file

    source = tiny("qwen3")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = hf_tensors(source)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][7, 5] = 3.0
    tensors[name][9, 1] = torch.nan
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    mca = convert(source, "mca", tp=2, pp=2)
    assert main(["verify", str(mca), str(other)]) == 1
    out = capsys.readouterr().out
    assert f"{name}: 2 elements differ, the first at [7, 5]" in out and "and 3;" in out
    assert "largest difference inf" in out  # a NaN is as far from a number as can be
    assert main(["verify", str(other), str(other)]) == 0  # the same bits are the same, NaN or not
    assert main(["verify", str(tiny("llama")), str(mca)]) == 1
    assert "model_type: 'llama' and 'qwen3'" in capsys.readouterr().out
