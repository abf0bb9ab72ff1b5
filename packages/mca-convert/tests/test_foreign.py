"""Checkpoints that others wrote, through the command: ROLL's, Megatron's torch_dist, quantised ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from files import assert_same_tensors, hf_tensors
from quantise import fp8_copy, mxfp4_copy
from safetensors.torch import load_file

from mca_convert.cli import main
from mca_convert.pool import Limits

FIXTURE = Path(__file__).parents[4] / "shared/fixtures/roll_llama_tiny"
DTYPES = {"--bf16": torch.bfloat16, "--fp16": torch.float16, "--fp32": torch.float32}


@pytest.mark.skipif(not FIXTURE.exists(), reason="the shared fixture is not there")
def test_what_roll_wrote_goes_to_hugging_face_and_to_mca(convert) -> None:
    roll = FIXTURE / "mca_tp2_pp2"
    back = convert(roll, "hf")
    assert_same_tensors(FIXTURE / "hf", back)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (FIXTURE / "hf/config.json").read_text()
    )
    assert (back / "tokenizer.json").read_bytes() == (roll / "tokenizer.json").read_bytes()
    mca = convert(roll, "mca", "--to", "mca", tp=4, pp=1)
    assert main(["verify", str(mca), str(FIXTURE / "hf")]) == 0
    assert main(["verify", str(roll), str(mca)]) == 0


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "qwen3_moe"])
def test_torch_dist_goes_to_hugging_face_and_to_mca(case: str, tiny, convert, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from mca_models.checkpoint.hf_directory import HfSource

    source = HfSource(tiny(case, "bfloat16"))
    tensors = load_file(source.path / "model.safetensors")
    state = {}
    for param in source.params:
        name = param.mca_name()
        if param.expert is not None:
            head, _, tail = name.partition(".experts.")
            name = f"{head}.experts.experts.{param.expert}.{tail.removesuffix(str(param.expert))}"
        state[name] = param.to_full([tensors[hf] for hf in param.hf_names()]).clone()
    folder = tmp_path / "megatron" / "iter_0000007"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    config = json.loads((source.path / "config.json").read_text())
    published = {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder.parent / "config.json").write_text(json.dumps(published))
    mca = convert(folder.parent, "mca", "--to", "mca", tp=2, pp=2)
    for back in (convert(folder.parent, "hf"), convert(mca, "back")):
        assert_same_tensors(source.path, back)
        assert json.loads((back / "config.json").read_text()) == config, "whose weights are not quantised"
    assert main(["verify", str(mca), str(source.path)]) == 0
    for place, name in (
        (folder.parent, "tokenizer.json"),
        (folder.parent, "vocab.txt"),
        (folder, "vocab.txt"),
    ):
        (place / name).write_text(place.name)
    named = convert(folder, "named")  # whose configuration is that of the folder above
    assert_same_tensors(source.path, named)
    assert [(named / name).read_text() for name in ("tokenizer.json", "vocab.txt")] == [
        "megatron",
        folder.name,
    ]
    (folder / "vocab.txt").unlink()
    shutil.copy(source.path / "config.json", folder)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "tokenizer.json").write_text("{}")
    one = convert(
        folder, "iteration"
    )  # the iteration itself may be named; nothing of its own format goes along
    assert {file.name for file in one.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert_same_tensors(source.path, one)


@pytest.fixture(params=["kept", "in bands"])
def ways(request, monkeypatch) -> None:
    """Dequantised matrices are kept for the next chunk, or computed band by band where they are large."""
    if request.param == "in bands":
        monkeypatch.setattr(Limits, "computed_bytes", property(lambda self: 0))


@pytest.mark.cases(4)
@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("flag", DTYPES)
@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_fp8_is_dequantised_on_the_way(case: str, flag: str, tiny, convert, tmp_path: Path) -> None:
    plain = fp8_copy(tiny(case, "bfloat16"), tmp_path / "fp8")
    mca = convert(tmp_path / "fp8", "mca", flag, tp=2, pp=2)
    back = convert(mca, "hf")
    config = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == str(DTYPES[flag]).removeprefix("torch.")
    found = hf_tensors(back)
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(found[name], tensor if kept else tensor.to(DTYPES[flag])), name
    direct = convert(tmp_path / "fp8", "direct", flag, "--to", "hf")
    assert_same_tensors(back, direct)
    assert main(["verify", str(tmp_path / "fp8"), str(mca), "--tolerance", "1"]) == 0


@pytest.mark.usefixtures("ways")
def test_mxfp4_is_dequantised_on_the_way(convert, tmp_path: Path) -> None:
    import tiny_hf

    source = tiny_hf.save("gpt_oss", tmp_path / "source", "bfloat16", intermediate_size=64)
    plain = mxfp4_copy(source, tmp_path / "mxfp4")
    for number, layout in enumerate(({"tp": 2, "pp": 2, "etp": 1}, {"ep": 2, "etp": 1, "tp": 2})):
        mca = convert(tmp_path / "mxfp4", f"mca{number}", **layout)
        found = hf_tensors(convert(mca, f"hf{number}"))
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
        assert main(["verify", str(tmp_path / "mxfp4"), str(mca)]) == 0


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_quantisations_are_refused_by_name(method: str, tiny, tmp_path: Path, capsys) -> None:
    fp8_copy(tiny("llama", "bfloat16"), tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    assert main(["--checkpoint_path", str(tmp_path / "source"), "--output_path", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"source/config.json: quant_method '{method}' cannot be read" in error
    assert not (tmp_path / "out").exists()


def test_a_config_with_fp8_blocks_and_plain_weights_is_reported(source: Path, convert, caplog) -> None:
    config = json.loads((source / "config.json").read_text())
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps({**config, **said}))
    back = convert(source, "hf", "--to", "hf")
    assert f"{source / 'config.json'} has quantization_config, but no tensor is quantised" in caplog.text
    assert json.loads((back / "config.json").read_text()) == config
    assert_same_tensors(source, back)


@pytest.mark.parametrize("strided", [False, True])
def test_pickled_weights_go_to_mca_and_are_the_same_model(strided: bool, source: Path, convert, tiny) -> None:
    weights = load_file(source / "model.safetensors")
    if strided:
        weights = {name: x.t().contiguous().t() if x.dim() == 2 else x for name, x in weights.items()}
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    mca = convert(source, "mca", tp=2, pp=2)
    assert main(["verify", str(mca), str(tiny("llama"))]) == 0
    assert main(["inspect", str(source)]) == 0
    assert main(["plan", "--checkpoint_path", str(source)]) == 0
