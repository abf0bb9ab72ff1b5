"""``mca-convert inspect`` tells every kind of directory apart."""

import json
from pathlib import Path

import pytest
from quantise import fp8_copy
from safetensors.torch import load_file, save_file

from mca_convert.cli import main

FIXTURE = Path(__file__).parents[4] / "shared/fixtures/roll_llama_tiny"


def inspected(path: Path, capsys, code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["inspect", "--json", str(path)]) == code
    found = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(path)]) == code
    head = capsys.readouterr().out.partition("\n")[0]
    assert head == f"{path}: {found['kind']}{', not readable' if code else ''}"
    return found


def test_hugging_face(tiny, capsys) -> None:
    found = inspected(tiny("qwen3_moe", "bfloat16"), capsys)
    assert found["kind"] == "Hugging Face checkpoint" and found["problem"] is None
    assert found["facts"]["model_type"] == "qwen3_moe" and found["facts"]["architecture"].startswith(
        "Qwen3Moe"
    )
    assert "experts 4" in found["facts"]["sizes"]
    assert list(found["dtypes"]) == ["BF16"] and list(found["files"]) == ["model.safetensors"]
    assert [entry[3] for entry in found["biggest"]] == sorted((e[3] for e in found["biggest"]), reverse=True)


@pytest.mark.parametrize(
    ("end", "head"),
    [
        ("ForSequenceClassification", "sequence classification, 3 labels"),
        ("ForTokenClassification", "token classification, 3 labels"),
    ],
)
def test_a_head_for_scores(end: str, head: str, source: Path, capsys) -> None:
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": [f"Llama{end}"],
        "id2label": {str(number): f"L{number}" for number in range(3)},
    }
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:3].clone()
    if end == "ForTokenClassification":
        tensors["score.bias"] = tensors["score.weight"][:, 0].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    facts = inspected(source, capsys)["facts"]
    assert (facts["architecture"], facts["head"]) == (f"Llama{end}", head)


def test_quantised(tiny, capsys, tmp_path: Path) -> None:
    fp8_copy(tiny("llama", "bfloat16"), tmp_path / "fp8")
    found = inspected(tmp_path / "fp8", capsys)
    assert found["facts"]["quantised"] == "fp8, blocks of [12, 20]"
    assert {"F8_E4M3", "F32", "BF16"} == found["dtypes"].keys()


def test_mca(tiny, convert, capsys) -> None:
    found = inspected(convert(tiny("llama"), "mca", tp=2, pp=2), capsys)
    assert found["kind"] == "MCA checkpoint"
    assert found["facts"]["layout"] == "tp 2 pp 2" and found["facts"]["iteration"] == 1
    assert len(found["files"]) == 4


@pytest.mark.skipif(not FIXTURE.exists(), reason="the shared fixture is not there")
def test_roll(capsys) -> None:
    found = inspected(FIXTURE / "mca_tp2_pp2", capsys)
    assert found["kind"] == "ROLL mcore_adapter checkpoint"
    assert found["facts"]["layout"] == "tp 2 pp 2" and found["facts"]["parameters"] == 1000576


def test_torch_dist(tiny, capsys, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from mca_models.checkpoint.hf_directory import HfSource

    source = HfSource(tiny("llama", "bfloat16"))
    hf = load_file(source.path / "model.safetensors")
    state = {p.mca_name(): p.to_full([hf[name] for name in p.hf_names()]).clone() for p in source.params}
    dcp.save(state, checkpoint_id=tmp_path / "dist", no_dist=True)
    (tmp_path / "dist/config.json").write_bytes((source.path / "config.json").read_bytes())
    found = inspected(tmp_path / "dist", capsys)
    assert found["kind"] == "Megatron torch_dist checkpoint" and found["dtypes"]["BF16"]


def test_damaged(tiny, convert, capsys) -> None:
    mca = convert(tiny("llama"), "mca", tp=2)
    (mca / "iter_0000001/pp_000/tp_01.safetensors").unlink()
    found = inspected(mca, capsys, code=1)
    assert "no such file" in found["problem"] and found["facts"]["model_type"] == "llama"


def test_adapters(tiny, capsys, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny("qwen2"))
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    found = inspected(tmp_path / "adapter", capsys)
    assert found["kind"] == "PEFT LoRA adapter" and found["facts"]["r"] == 3
    capsys.readouterr()
    arguments = ["--checkpoint_path", str(tmp_path / "adapter"), "--output_path", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "an adapter, not a whole model; for one merged model: --checkpoint_path BASE" in error
    assert "for an MCA adapter: --checkpoint_path BASE" in error
    converted = ["--adapter_path", str(tmp_path / "adapter"), "--output_path", str(tmp_path / "mca")]
    assert main(["--checkpoint_path", str(tiny("qwen2")), *converted]) == 0
    assert main(["--checkpoint_path", str(tmp_path / "mca"), "--output_path", str(tmp_path / "out")]) == 1
    assert f"for a PEFT adapter: --adapter_path {tmp_path / 'mca'} without" in capsys.readouterr().err
    assert main(["--adapter_path", str(tmp_path / "mca"), "--output_path", str(tmp_path / "out")]) == 0
    assert inspected(tmp_path / "out", capsys)["kind"] == "PEFT LoRA adapter"


def test_a_type_that_is_not_supported_without_weights(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    found = inspected(tmp_path, capsys, code=1)
    assert found["problem"].startswith("model_type 'rwkv' is not supported: state space")


def test_nothing(tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(tmp_path / "absent")]) == 1
    assert "no such directory" in capsys.readouterr().err
    found = inspected(tmp_path, capsys, code=1)
    assert "config.json: no such file" in found["problem"]
