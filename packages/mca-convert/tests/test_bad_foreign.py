"""Damaged checkpoints of others: one clear error, and nothing at the output path."""

import shutil
import stat
from pathlib import Path

import pytest
from files import damage_header, refused, truncate
from quantise import fp8_copy

QUANTISED = {
    "scale of another shape": (
        lambda header: header["model.layers.0.mlp.up_proj.weight_scale_inv"].update(shape=[1, 8]),
        "blocks of 12 x 20",
    ),
    "no scale": (
        lambda header: header.update(
            {"model.layers.0.mlp.other": header.pop("model.layers.0.mlp.up_proj.weight_scale_inv")}
        ),
        "is fp8 but has no scale",
    ),
}


@pytest.mark.parametrize("damage", sorted(QUANTISED))
def test_damaged_quantised_checkpoints(damage: str, tiny, tmp_path: Path, capsys) -> None:
    fp8_copy(tiny("llama", "bfloat16"), tmp_path / "fp8")
    change, message = QUANTISED[damage]
    damage_header(change)(tmp_path / "fp8/model.safetensors")
    assert message in refused(tmp_path / "fp8", tmp_path, capsys)


FIXTURE = Path(__file__).parents[4] / "shared/fixtures/roll_llama_tiny/mca_tp2_pp2"
ROLL = {
    "truncated": (lambda roll: truncate(roll / RANK / "model_optim_rng.pt"), "truncated"),
    "missing": (lambda roll: shutil.rmtree(roll / RANK), "1 missing rank (mp_rank_01_000)"),
    "no zip": (
        lambda roll: (roll / RANK / "model_optim_rng.pt").write_bytes(b"x" * 99),
        "not a file of torch.save",
    ),
    "pickle": (lambda roll: (roll / RANK / "model_optim_rng.pt").write_bytes(b"\x80\x02}."), "torch"),
}
RANK = "iter_0000001/mp_rank_01_000"


@pytest.mark.skipif(not FIXTURE.exists(), reason="the shared fixture is not there")
@pytest.mark.parametrize("damage", sorted(ROLL))
def test_damaged_trees_of_roll(damage: str, tmp_path: Path, capsys) -> None:
    shutil.copytree(FIXTURE, tmp_path / "roll")
    for path in (tmp_path / "roll").rglob("*"):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)  # the fixtures may be read-only, and the user not root
    apply, message = ROLL[damage]
    apply(tmp_path / "roll")
    assert message in refused(tmp_path / "roll", tmp_path, capsys)
