"""MTP layers that nothing here builds go from Hugging Face to Megatron's files and back bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_hf
import torch
from files import assert_same_tensors, hf_tensors
from safetensors.torch import load_file, save_file

from mca_convert.cli import main

CARRIED = {
    "hy_v3": ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.experts.3.up_proj.weight"),
    "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
}


def published(case: str, source: Path, directory: Path) -> Path:
    """``source`` with tensors of an MTP layer, which its ``config.json`` counts."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    matrix, other = CARRIED[case]
    more = {matrix: torch.randn(6, 5).bfloat16(), other: torch.randn(7), f"{other[:-6]}bias": torch.randn(3)}
    save_file({**tensors, **more}, directory / "model.safetensors", {"format": "pt"})
    config = tiny_hf.read_config(directory) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("case", CARRIED)
def test_they_come_back_bit_for_bit(case: str, tiny, convert, tmp_path: Path, capsys) -> None:
    source = published(case, tiny(case), tmp_path / "source")
    mca = convert(source, "mca", tp=2, pp=2, ep=2)
    other = convert(mca, "other", "--to=mca", pp=4)
    assert main(["verify", str(source), str(other)]) == 0
    back = convert(other, "back")
    assert_same_tensors(source, back)
    assert tiny_hf.read_config(back) == tiny_hf.read_config(source)
    capsys.readouterr()
    assert main(["inspect", "--json", str(mca)]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["parameters not used by mca"] == 40
    assert main(["plan", f"--checkpoint_path={source}"]) == 0


def test_a_cast_casts_them_too(tiny, convert, tmp_path: Path) -> None:
    source = published("ernie4_5_moe", tiny("ernie4_5_moe"), tmp_path / "source")
    back = hf_tensors(convert(convert(source, "mca"), "back", "--bf16"))
    assert {back[name].dtype for name in CARRIED["ernie4_5_moe"]} == {torch.bfloat16}
