"""Complete omni checkpoints go both ways: the thinker is converted, the talker and its vocoder are copied."""

import json
from pathlib import Path

import pytest
import tiny_omni
import torch
from files import assert_same_tensors, hf_tensors
from safetensors.torch import save_file

from mca_config.model_config import McaModelConfig
from mca_convert.cli import main
from mca_models.templates import config_to_hf, get_family
from mca_models.weights import Stage


@pytest.mark.parametrize("kind", tiny_omni.WHOLE)
def test_everything_goes_both_ways(kind: str, tmp_path: Path, convert) -> None:
    source = tiny_omni.save_whole(kind, tmp_path / "source", "bfloat16")
    first = convert(source, "tp", tp=2, pp=2)
    layout = {"pp": 4} if kind == "qwen2_5_omni" else {"tp": 2, "ep": 2, "etp": 1}
    second = convert(first, "other", "--to=mca", **layout)
    back = convert(second, "back")
    assert_same_tensors(source, back)
    written, original = (json.loads((path / "config.json").read_text()) for path in (back, source))
    assert written == original
    assert (back / tiny_omni.SPEAKERS).read_bytes() == (source / tiny_omni.SPEAKERS).read_bytes()
    assert main(["verify", str(source), str(second)]) == 0
    config = McaModelConfig.load(second)
    spoken = [p for p in get_family(kind).params(config) if p.stage is Stage.PASSTHROUGH]
    expected = {name for name in hf_tensors(source) if not name.startswith("thinker.")}
    assert {name for param in spoken for name in param.hf_names()} == expected


def test_inspect_counts_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_omni.save_whole("qwen2_5_omni", tmp_path / "source")
    capsys.readouterr()
    assert main(["inspect", str(source), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    counts = {"vision": 0, "audio": 0, "projector": 0}
    for name, x in hf_tensors(source).items():
        if "merger" in name or "audio_tower.proj" in name:
            counts["projector"] += x.numel()
        elif name.startswith(("thinker.visual", "thinker.audio_tower")):
            counts["audio" if "audio_tower" in name else "vision"] += x.numel()
    assert {part: facts[f"{part} parameters"] for part in counts} == counts
    assert facts["audio parameters"] > 0


@pytest.mark.parametrize("kind", tiny_omni.WHOLE)
def test_a_changed_talker_is_another_checkpoint(kind: str, tmp_path: Path, convert) -> None:
    source = tiny_omni.save_whole(kind, tmp_path / "source")
    mca = convert(source, "mca", tp=2)
    tensors = hf_tensors(source)
    name = next(name for name in tensors if name.startswith("talker."))
    tensors[name] = tensors[name] + 1
    save_file(
        {key: x.contiguous() for key, x in tensors.items()}, source / "model.safetensors", {"format": "pt"}
    )
    assert main(["verify", str(source), str(mca)]) == 1


def test_a_cast_leaves_the_vocoder_in_fp32(tmp_path: Path, convert) -> None:
    source = tiny_omni.save_whole("qwen2_5_omni", tmp_path / "source")
    back = convert(convert(source, "mca", "--bf16", pp=2), "back")
    dtypes = {(name.split(".")[0], x.dtype) for name, x in hf_tensors(back).items()}
    assert dtypes == {
        ("thinker", torch.bfloat16),
        ("talker", torch.bfloat16),
        ("token2wav", torch.float32),
    }
    config = json.loads((back / "config.json").read_text())
    assert config == config_to_hf(McaModelConfig.load(tmp_path / "mca")) and config["dtype"] == "bfloat16"
